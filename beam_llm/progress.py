"""Live progress of a run: workers send snapshots over loopback UDP, the command line draws them.

Beam's local runner shows no metrics before a run has ended, so this goes around it. A lost datagram is no matter: the
next one carries the same totals.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import orjson

from beam_llm.failure_examples import failure_example
from beam_llm.records import FailedRequest

ADDRESS_ENV = "BEAM_LLM_PROGRESS"
"""Names the `host:port` that snapshots go to; set by the command line, inherited by the worker processes."""

_INTERVAL_S = 0.5

_MAX_DATAGRAM = 65_507

_NUMBERS = ("rows", "bytes_read", "sent", "open", "completed", "failed")


@dataclass(slots=True)
class Counts:
    """What one worker process has done so far. Shown, never relied on: the records and metrics are the truth.

    `examples` holds a failure of each kind that rows ended with, or failed with several times; `suspicion` is that of
    `stopping.AllAlike`.
    """

    rows: int = 0
    bytes_read: int = 0
    sent: int = 0
    open: int = 0
    completed: int = 0
    failed: int = 0
    examples: dict[str, str] = field(default_factory=dict)
    suspicion: str | None = None

    def add(self, other: Counts) -> None:
        """Adds another process's counts to these."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.examples = {**other.examples, **self.examples}
        self.suspicion = self.suspicion or other.suspicion

    @property
    def finished(self) -> int:
        """Rows with an outcome."""
        return self.completed + self.failed


COUNTS = Counts()
"""This process's counts."""


def show_failure(failed: FailedRequest) -> None:
    """Lets the command line show why this process's requests fail: the first failure of each kind."""
    if failed.kind not in COUNTS.examples:
        COUNTS.examples[str(failed.kind)] = failure_example(failed)


_START = threading.Lock()
_reporting = False


def report_progress() -> None:
    """Starts this process's sender, once, if the command line asked for it."""
    global _reporting
    address = os.environ.get(ADDRESS_ENV)
    with _START:
        if _reporting or not address:
            return
        _reporting = True
    host, _, port = address.rpartition(":")
    threading.Thread(target=_send_snapshots, args=(host, int(port)), name="beam_llm-progress", daemon=True).start()


def _send_snapshots(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, suppress(OSError):  # the command line is gone
        while True:
            udp.sendto(orjson.dumps([os.getpid(), COUNTS]), (host, port))
            time.sleep(_INTERVAL_S)


def report_stop(reason: str) -> bool:
    """Tells the command line that the run cannot succeed; it then ends the run, this process included.

    Returns:
        Whether there is a command line to tell.
    """
    address = os.environ.get(ADDRESS_ENV)
    if not address:
        return False
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, suppress(OSError):
        udp.sendto(orjson.dumps({"stop": reason[:2000]}), (host, int(port)))
    return True


class ProgressReceiver:
    """The command line's end: keeps the newest snapshot of each process. A context manager.

    Args:
        on_stop: Called, on another thread, with the reason of a worker that finds the run doomed.
        on_all_alike: Called with the suspicion of a worker whose first requests all failed alike, once nothing else has
            come back to any other worker either, be it from a store; perhaps more than once. None: the run goes on.
    """

    def __init__(
        self, on_stop: Callable[[str], None] = lambda reason: None, on_all_alike: Callable[[str], None] | None = None
    ) -> None:
        self._on_stop = on_stop
        self._on_all_alike = on_all_alike
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", 0))
        self._newest: dict[int, Counts] = {}
        self._thread = threading.Thread(target=self._receive, name="beam_llm-progress-receiver", daemon=True)

    def __enter__(self) -> ProgressReceiver:
        host, port = self._udp.getsockname()
        os.environ[ADDRESS_ENV] = f"{host}:{port}"
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.pop(ADDRESS_ENV, None)
        self._udp.sendto(b"", self._udp.getsockname())  # closing alone does not wake a thread that receives
        self._thread.join()
        self._udp.close()

    def totals(self) -> Counts:
        """The sum over all worker processes heard of."""
        total = Counts()
        for counts in list(self._newest.values()):
            total.add(counts)
        return total

    def _receive(self) -> None:
        while datagram := self._udp.recv(_MAX_DATAGRAM):
            self._take(datagram)

    def _take(self, datagram: bytes) -> None:
        with suppress(ValueError, TypeError, KeyError):  # not one of ours
            message = orjson.loads(datagram)
            if isinstance(message, dict):
                self._on_stop(str(message["stop"]))
            else:
                process, counts = message
                self._take_counts(process, Counts(**counts))

    def _take_counts(self, process: int, counts: Counts) -> None:
        before = self._newest.get(process, Counts())
        self._newest[process] = counts
        # Suspected twice in a row: what the other processes said in the meantime counts too.
        if self._on_all_alike is not None and before.suspicion and counts.suspicion and self._nothing_else_comes():
            self._on_all_alike(counts.suspicion)

    def _nothing_else_comes(self) -> bool:
        newest = self._newest.values()
        return not any(counts.completed or (counts.open and not counts.suspicion) for counts in newest)
