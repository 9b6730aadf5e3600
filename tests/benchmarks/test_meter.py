"""The meter counts what it claims to count."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks.meter import Reading, Sample, run_metered

BURN_S = 0.3
BURN = f"""
import time
def burn():
    while time.process_time() < {BURN_S}:
        pass
"""
"""Python that uses so much CPU in the process that calls `burn()`, start-up included."""

KILLED_GRANDCHILD = (
    BURN
    + """
import os, signal
reading, writing = os.pipe()
if (child := os.fork()) == 0:
    start = time.process_time()
    while time.process_time() - start < 0.3:
        pass
    os.write(writing, b"done")
    signal.pause()
os.read(reading, 4)
os.kill(child, signal.SIGKILL)
os._exit(0)  # without waiting for it
"""
)

LEFT_BEHIND = (
    BURN
    + """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        start = time.process_time()
        while time.process_time() - start < 0.3:
            pass
    os._exit(0)
os._exit(0)
"""
)


def run(tmp_path: Path, code: str, every_s: float = 0.0) -> Reading:
    return run_metered([sys.executable, "-c", code], tmp_path / "run.log", every_s, timeout_s=30)


def test_cpu_of_the_command_itself_is_counted(tmp_path: Path) -> None:
    assert BURN_S <= run(tmp_path, BURN + "burn()").cpu_s < 2 * BURN_S


@pytest.mark.parametrize("code", [KILLED_GRANDCHILD, LEFT_BEHIND], ids=["killed, not waited for", "left behind"])
def test_cpu_of_a_process_counts_however_it_ended(tmp_path: Path, code: str) -> None:
    assert run(tmp_path, code).cpu_s >= BURN_S


def test_wall_time_ends_with_the_command_not_with_what_it_left_behind(tmp_path: Path) -> None:
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(1.5)\n    os._exit(0)"
    started_s = time.monotonic()
    reading = run(tmp_path, code)
    assert reading.wall_s < 1.2
    assert time.monotonic() - started_s >= 1.5


def test_memory_shared_by_forks_counts_once(tmp_path: Path) -> None:
    code = "import os, time\nheld = os.urandom(80_000_000)\nfor _ in range(3): os.fork()\ntime.sleep(0.6)"
    reading = run(tmp_path, code, every_s=0.05)
    assert len(reading.processes) == 8
    assert 80 <= reading.peak_pss_mb < 200
    assert 80 <= reading.peak_worker_mb < 200


def test_a_command_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^exit code 1 after .*\nno such thing"):
        run(tmp_path, "raise SystemExit('no such thing')")


def test_cpu_between_two_times_takes_the_samples_within() -> None:
    reading = Reading(samples=[Sample(at_s, cpu_s, 0) for at_s, cpu_s in ((1, 5), (2, 6), (4, 6.5), (9, 8))])
    assert reading.cpu_between(1.5, 8) == (0.5, 2)
