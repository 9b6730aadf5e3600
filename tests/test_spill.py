"""Large values on disk: back as they were, room used again, nothing left behind."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest

from beam_llm.jsontext import dumps
from beam_llm.spill import LARGE_BYTES, Spilled, SpillFile, spill_large

URL = "data:image/png;base64," + "A" * LARGE_BYTES


@pytest.mark.parametrize("value", [b"x" * 5000, bytes(range(256)) * 100, "é\ud800" * 3000, URL, b"", ""])
def test_a_value_comes_back_as_it_was(value: bytes | str) -> None:
    spilled = Spilled(value, SpillFile())
    assert spilled.load() == value
    assert spilled.length == len(value)


def test_room_is_used_again_once_nobody_holds_its_value() -> None:
    spill = SpillFile()
    for _ in range(1000):
        Spilled(b"x" * 100_000, spill)
    assert spill.size == 1 << 17
    kept = [Spilled(bytes([i]) * 100_000, spill) for i in range(10)]
    assert spill.size == 10 << 17
    assert [set(value.load()) for value in kept] == [{i} for i in range(10)]


def test_many_threads_keep_their_values_apart() -> None:
    spill, wrong = SpillFile(), []

    def work(number: int) -> None:
        for i in range(200):
            data = bytes([number, i]) * (2000 + 37 * i)
            if Spilled(data, spill).load() != data:
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert spill.size <= 8 << 16


@pytest.mark.parametrize(
    ("value", "spilled"),
    [
        (URL, True),
        (URL[:100], False),
        ("text " * 5000, False),
        (b"x" * LARGE_BYTES, True),
        (b"x" * 100, False),
    ],
)
def test_only_large_pictures_go_to_disk(value: Any, spilled: bool) -> None:
    row = {"a": [{"url": value, "n": 1}], "b": "text"}
    kept = spill_large(row, SpillFile())
    assert isinstance(kept["a"][0]["url"], Spilled) == spilled
    assert kept["a"][0]["n"] == 1
    assert row["a"][0]["url"] is value, "what was given is not changed"  # type: ignore[index]
    assert pickle.loads(pickle.dumps(kept)) == row  # noqa: S301 - made here


def test_a_text_on_disk_is_written_to_json_as_the_text() -> None:
    assert dumps({"text": Spilled(URL, SpillFile())}) == dumps({"text": URL})


def test_a_disk_that_takes_no_more_is_named_with_the_way_out() -> None:
    code = (
        "import resource; from beam_llm.spill import *\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "spill = SpillFile(); kept = []\n"
        "try:\n    while True: kept.append(Spilled(b'x' * 16384, spill))\n"
        "except SpillError as error: print(len(kept), error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("4 large rows cannot be kept in ")
    assert "set TMPDIR to a larger disk" in done.stdout
