"""What worker processes tell the command line while a run goes on, and what it shows and concludes."""

from __future__ import annotations

import io
import os
import socket
from contextlib import suppress
from typing import Any

import orjson
import pytest

from beam_llm.errors import ErrorKind
from beam_llm.progress import ADDRESS_ENV, COUNTS, Counts, ProgressReceiver, show_failure
from beam_llm.progress_bar import ProgressBar
from beam_llm.records import FailedRequest
from tests.commands import wait_until

ALIKE = Counts(rows=200, sent=150, open=16, suspicion="all alike")
SLOW = Counts(rows=200, sent=16, open=16)
DONE = Counts(rows=20, sent=20, failed=20)
ANSWERED = Counts(rows=200, sent=100, open=16, completed=1)


def told(*snapshots: tuple[int, Counts], on_all_alike: Any = True) -> list[str]:
    """What a receiver makes of the snapshots of processes, by their ids, in this order."""
    reasons: list[str] = []
    listen = reasons.append if on_all_alike else None
    with ProgressReceiver(on_all_alike=listen) as receiver:
        host, _, port = os.environ[ADDRESS_ENV].rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            for process, counts in snapshots:
                udp.sendto(orjson.dumps([process, counts]), (host, int(port)))
            udp.sendto(orjson.dumps([99, Counts(bytes_read=1)]), (host, int(port)))
        wait_until(lambda: receiver.totals().bytes_read, 5, "last snapshot")
        assert receiver.totals().rows == sum(counts.rows for counts in dict(snapshots).values())
    return reasons


def test_a_worker_that_suspects_the_run_twice_is_believed_when_no_other_has_anything_else() -> None:
    assert told((1, ALIKE)) == []
    assert told((1, ALIKE), (1, ALIKE)) == ["all alike"]
    assert told((2, DONE), (1, ALIKE), (2, DONE), (1, ALIKE)) == ["all alike"]


@pytest.mark.parametrize("other", [ANSWERED, SLOW])
def test_an_answer_or_a_request_still_open_elsewhere_keeps_the_run_alive(other: Counts) -> None:
    assert told((2, other), (1, ALIKE), (1, ALIKE), (1, ALIKE)) == []


def test_an_answer_that_is_told_between_the_two_suspicions_counts() -> None:
    assert told((1, ALIKE), (2, ANSWERED), (1, ALIKE)) == []


def test_a_run_in_which_every_row_may_fail_is_not_stopped() -> None:
    assert told((1, ALIKE), (1, ALIKE), on_all_alike=None) == []


def test_the_first_failure_of_each_kind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COUNTS, "examples", {})
    for name, kind in (("a", ErrorKind.TIMEOUT), ("b", ErrorKind.TIMEOUT), ("c", ErrorKind.BAD_IMAGE)):
        show_failure(FailedRequest(name, kind, "why"))
    assert orjson.loads(orjson.dumps(COUNTS))["examples"] == {"timeout": "a: why", "bad_image": "c: why"}


def test_a_log_gets_one_line_for_each_kind_within_a_second_and_never_again() -> None:
    counts, log = Counts(failed=1, examples={"timeout": "a: late"}), io.StringIO()
    with ProgressBar(lambda: counts, 0, 10, log):
        wait_until(log.getvalue, 3, "first line")
        counts.examples["bad_image"] = "b: gone"
        counts.failed = 1000
        wait_until(lambda: "bad_image" in log.getvalue(), 3, "second line")
    assert log.getvalue().splitlines() == [
        "beam_llm: requests fail (timeout), for example a: late",
        "beam_llm: requests fail (bad_image), for example b: gone",
    ]


def test_a_terminal_that_does_not_know_its_width_gets_a_bar_and_the_reasons() -> None:
    pty = pytest.importorskip("pty")
    terminal, end = pty.openpty()  # its size is 0 by 0
    with os.fdopen(end, "w") as stream:
        assert os.get_terminal_size(stream.fileno()).columns == 0
        with ProgressBar(lambda: Counts(completed=4, failed=1, examples={"timeout": "a: late"}), 0, 10, stream):
            pass
    drawn = b""
    with suppress(OSError):  # EIO: the other side is closed
        while piece := os.read(terminal, 4096):
            drawn += piece
    os.close(terminal)
    text = drawn.decode()
    assert "5/10" in text
    assert "beam_llm: requests fail (timeout), for example a: late\r\n" in text
