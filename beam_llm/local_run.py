"""What a local run needs around Beam's FnApiRunner: workers that can import us, and an end when one of them dies."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import grpc

from beam_llm.errors import BeamLLMError, RunStoppedError

WORKER_THREAD = "run_worker"
"""Name of the thread in which Beam waits for a worker process (local_job_service.py, SubprocessSdkWorker)."""

CONNECTION_THREADS = ("beam_control_read", "read_grpc_client_inputs")
"""Threads in which Beam reads what worker processes send; they raise when one is gone, of which we tell in one line."""


_HARMLESS = (
    "No semi_persistent_directory found",
    "Discarding unparseable args",
    "existing files in target path",
    "No shards found to finalize",
    "Failed to read inputs in the data plane",
)
"""What Beam warns of in every local run, or says of a worker's end besides our own message."""

_OWN_ERROR = re.compile(r"^beam_llm\.[\w.]*Error: (.+?)(?: \[while running .*\])?$", re.MULTILINE)
"""An error of ours in a traceback that came from a worker, without what Beam adds to it."""

_LOG_MESSAGE = re.compile(r'message: "((?:[^"\\]|\\.)*)"')


_SIGNAL_S = 0.5
"""How long we look for a signal to ourselves when a worker has died: one to the process group ends workers too."""

_END_S = 6.0
"""How long Beam may take to end a run that an error has ended."""


class WorkerDiedError(BeamLLMError):
    """A local worker process ended before its work was done."""


def let_workers_import_us() -> None:
    """Puts the project's folder on the PYTHONPATH of processes started from here: workers see only that and the cwd."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])


def shorten_worker_logs() -> None:
    """Makes readable lines of what local workers log: Beam prints their log entries as protobuf text.

    An error of ours that ends the run is told in one line by the command, not in Beam's six nested tracebacks as well.
    """
    for handler in logging.getLogger().handlers:
        handler.addFilter(shorten_record)


def shorten_record(record: logging.LogRecord) -> bool:
    """A log filter: makes a record of Beam's readable in place; False for one that says nothing new."""
    text = record.getMessage()
    if found := _LOG_MESSAGE.search(text):
        text = found[1].replace("\\n", "\n").replace('\\"', '"').replace("\\'", "'")
        record.msg, record.args = text, ()
    if record.exc_info and record.exc_info[1] is not None:
        text += "\n" + "".join(traceback.format_exception(record.exc_info[1]))
    return not (any(phrase in text for phrase in _HARMLESS) or _OWN_ERROR.search(text))


def reason_of(error: Exception) -> str:
    """Why a run failed, in one line: our own error out of a worker's traceback, else its last line."""
    text = f"beam_llm.Error: {error}" if isinstance(error, BeamLLMError) else str(error)
    if ours := _OWN_ERROR.search(text):
        return ours[1]
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _end_process(error: BeamLLMError) -> None:
    """Ends this process and all that it started, at once. Without /proc its workers end when its connections close."""
    for pid in list(_descendants(os.getpid())):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    sys.stderr.write(f"error: {reason_of(error)}\n")
    sys.stderr.flush()
    os._exit(1)


def _descendants(pid: int) -> Iterator[int]:
    children: list[str] = []
    with suppress(OSError):  # it has just ended
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            children += path.read_text().split()
    for child in children:
        yield int(child)
        yield from _descendants(int(child))


class MainThreadStop:
    """Ends a run from any thread by raising in the main thread, which waits inside Beam. A context manager.

    Beam 2.77 itself would tell of a worker's error only when the partitions before it have ended, and of a worker that
    died never: its waiting thread raises "Worker subprocess exited with return code …", and nobody listens. A signal
    is what wakes a main thread that is blocked in a lock; where threads get no signals (Windows), or outside the main
    thread, this does nothing.

    Ctrl-C and SIGTERM end a run in the same way. Before it ends, Beam waits for its workers, and for one that had not
    yet come up when the error was raised it would wait for ever: the process ends itself after `_END_S`.
    """

    def __init__(self) -> None:
        self._error: BeamLLMError | None = None
        self._end: threading.Timer | None = None
        self._able = hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> MainThreadStop:
        if self._able:
            numbers = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
            self._previous_handlers = [(number, signal.signal(number, self._raise)) for number in numbers]
            self._previous_hook = threading.excepthook
            threading.excepthook = self._watch_thread
        return self

    def __exit__(self, *_: object) -> None:
        if self._able:
            threading.excepthook = self._previous_hook
            for number, handler in self._previous_handlers:
                signal.signal(number, handler)
        if self._end is not None:
            self._end.cancel()

    def stop(self, error: BeamLLMError) -> None:
        """Raises the error in the main thread; the first one counts."""
        if self._able and self._error is None:
            self._error = error
            self._wake_main_thread()

    def _wake_main_thread(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def stop_run(self, reason: str) -> None:
        """Raises RunStoppedError in the main thread."""
        self.stop(RunStoppedError(reason))

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGUSR1 and self._error is None:
            how = "interrupted" if number == signal.SIGINT else "terminated"
            self._error = RunStoppedError(f"{how}; run the same command again")
        if self._error is not None:
            if self._end is None:
                self._end = threading.Timer(_END_S, _end_process, (self._error,))
                self._end.daemon = True
                self._end.start()
            raise self._error

    def _watch_thread(self, args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else ""
        if name in CONNECTION_THREADS and isinstance(args.exc_value, grpc.RpcError):
            return
        if WORKER_THREAD not in name:
            self._previous_hook(args)
        else:
            # The system may have given the signal to any thread: the main thread sees it when it next wakes.
            self._wake_main_thread()
            time.sleep(_SIGNAL_S)
            self.stop(
                WorkerDiedError(
                    f"a worker process died ({args.exc_value}): out of memory, or killed; run the same command again"
                )
            )
