"""Runs one command and measures all of its processes: CPU, memory, time.

    python -m tests.benchmarks.meter --report=FILE [--log=FILE] [--every=SECONDS] -- COMMAND…

CPU is what the kernel charged to every process that ended, user and system. The meter makes itself the reaper of all
that the command starts (PR_SET_CHILD_SUBREAPER), so a process counts however it ended and whether or not its parent
waited for it: either its parent's own usage holds it already, or it becomes a child of the meter, which waits for all.
Nothing is lost between two samples, and nothing needs root. Linux only.

Memory comes from samples of /proc: the proportional set size (PSS) of all processes together, since pages that forks
share must not count twice; and of each process the peak that the kernel keeps (VmHWM). Reading it costs the processes
some time, so measures of CPU do without (`--every=0`).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_LINGER_S = 10.0
"""How long processes of the command may outlive it before they are killed."""

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Sample:
    """All processes of the command at one time (seconds since the epoch)."""

    at_s: float
    cpu_s: float
    pss_mb: float


@dataclass(slots=True)
class Process:
    """One process of the command: its command line, when it was started, and the largest it ever was."""

    pid: int
    command: str
    started_s: float
    peak_rss_mb: float = 0.0


@dataclass(slots=True)
class Reading:
    """What a command took.

    Args:
        code: Its exit code.
        started_s, ended_s: Since the epoch.
        cpu_s: User and system time of all its processes.
        samples, processes: Empty unless samples were asked for.
    """

    code: int = -1
    started_s: float = 0.0
    ended_s: float = 0.0
    cpu_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """From start to end of the command itself."""
        return self.ended_s - self.started_s

    @property
    def peak_pss_mb(self) -> float:
        """Most memory that all processes held together."""
        return max(sample.pss_mb for sample in self.samples)

    @property
    def peak_worker_mb(self) -> float:
        """Most memory of one process other than the command's first."""
        return max((process.peak_rss_mb for process in self.processes[1:]), default=0.0)

    def cpu_between(self, from_s: float, to_s: float) -> tuple[float, float]:
        """(CPU seconds, seconds) between the first and the last sample within a span."""
        within = [sample for sample in self.samples if from_s <= sample.at_s <= to_s]
        if len(within) < 2:
            raise ValueError(f"no two samples within {to_s - from_s:.1f} s")
        return within[-1].cpu_s - within[0].cpu_s, within[-1].at_s - within[0].at_s


def run_metered(command: list[str], log: Path, every_s: float = 0.0, timeout_s: float = 600.0) -> Reading:
    """Runs a command under a meter of its own.

    Args:
        command: Program and arguments; runs in the current folder.
        log: Gets all that it prints.
        every_s: Seconds between samples; 0 = none are taken.
        timeout_s: It is killed after that, with all that it started.

    Raises:
        RuntimeError: It failed or took too long; with the end of what it printed.
    """
    report = log.with_suffix(".reading.json")
    report.unlink(missing_ok=True)
    meter = [sys.executable, "-m", __name__, f"--report={report}", f"--log={log}", f"--every={every_s}"]
    subprocess.run([*meter, f"--timeout={timeout_s}", "--", *command], check=True)
    found = json.loads(report.read_text())
    found["samples"] = [Sample(**sample) for sample in found["samples"]]
    found["processes"] = [Process(**process) for process in found["processes"]]
    reading = Reading(**found)
    if reading.code != 0:
        said = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"exit code {reading.code} after {reading.wall_s:.1f} s: {' '.join(command)}\n{said}")
    return reading


def measure(command: list[str], log: Path, every_s: float, timeout_s: float) -> Reading:
    """Runs the command in this process, which must have no other children, and waits for all that it starts."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    reading = Reading(started_s=time.time())
    with log.open("wb") as out:
        root = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    ended = threading.Event()
    sampler = threading.Thread(target=_sample_until, args=(ended, every_s, reading))
    if every_s > 0:
        sampler.start()
    killer = _kill_after(timeout_s)
    with suppress(ChildProcessError):  # raised once nobody is left
        while True:
            pid, status, usage = os.wait4(-1, 0)
            reading.cpu_s += usage.ru_utime + usage.ru_stime
            if pid == root.pid:
                reading.ended_s = time.time()
                reading.code = root.returncode = os.waitstatus_to_exitcode(status)
                killer.cancel()
                killer = _kill_after(_LINGER_S)
    killer.cancel()
    ended.set()
    if every_s > 0:
        sampler.join()
    return reading


def _kill_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, _kill_all)
    timer.daemon = True
    timer.start()
    return timer


def _kill_all() -> None:
    for pid in list(_descendants(os.getpid())):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _sample_until(ended: threading.Event, every_s: float, reading: Reading) -> None:
    seen: dict[int, Process] = {}
    while not ended.wait(every_s):
        cpu_s = pss_mb = 0.0
        for pid in list(_descendants(os.getpid())):
            with suppress(OSError, ValueError, IndexError):  # it has just ended
                stat = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
                cpu_s += sum(int(ticks) for ticks in stat[11:15]) * _TICK_S  # with its children that were waited for
                if pid not in seen:
                    seen[pid] = Process(pid, _command_of(pid), _booted_s() + int(stat[19]) * _TICK_S)
                    reading.processes.append(seen[pid])
                seen[pid].peak_rss_mb = max(seen[pid].peak_rss_mb, _kilobytes(pid, "status", "VmHWM:") / 1000)
                pss_mb += _kilobytes(pid, "smaps_rollup", "Pss:") / 1000
        reading.samples.append(Sample(time.time(), cpu_s, pss_mb))


def _descendants(pid: int) -> Iterator[int]:
    children: list[str] = []
    with suppress(OSError):  # it has just ended
        for path in (_PROC / str(pid) / "task").glob("*/children"):
            children += path.read_text().split()
    for child in children:
        yield int(child)
        yield from _descendants(int(child))


def _command_of(pid: int) -> str:
    return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]


def _booted_s() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _kilobytes(pid: int, file: str, field_name: str) -> float:
    """A field of a file in /proc, in 1,000 bytes; 0 for a process that has just ended."""
    for line in (_PROC / str(pid) / file).read_text().splitlines():
        if line.startswith(field_name):
            return int(line.split()[1]) * 1.024
    return 0.0


def main() -> None:
    """Runs what the arguments say and writes the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--log", type=Path, default=Path(os.devnull))
    parser.add_argument("--every", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    reading = measure(arguments.command, arguments.log, arguments.every, arguments.timeout)
    arguments.report.write_text(json.dumps(asdict(reading)))


if __name__ == "__main__":
    main()
