"""Runs a spooled job on Beam's local runner, in this process or in worker processes, from any thread."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from beam_llm.config import ChatConfig
from beam_llm.errors import BeamLLMError, RunStoppedError
from beam_llm.io import Format, InputFormat, ReadRequests, WriteResults
from beam_llm.local_run import (
    CONNECTION_THREADS,
    WORKER_THREAD,
    WorkerDiedError,
    let_workers_import_us,
    reason_of,
    shorten_record,
)
from beam_llm.progress import ADDRESS_ENV, COUNTS, Counts, ProgressReceiver, report_progress
from beam_llm.progress_bar import ProgressBar
from beam_llm.records import ChatRequest, FailedRequest
from beam_llm.runner import settle_runner
from beam_llm.spool import RestorePictures, Spool
from beam_llm.summary import Summary, summarise
from beam_llm.transforms import ChatCompletion

_WORKERS = threading.Lock()
"""Held by the one job of this process that has worker processes; each takes what cores there are."""

_WANTED = "wanted"
"""A file in the job's folder; worker processes end when it goes."""

_LOOK_S, _LEAVE_S = 0.3, 30.0
"""How often they look for it, and how long a job that has failed waits for them; some may still be starting."""

_BEAM_THREADS = (WORKER_THREAD, *CONNECTION_THREADS)


def run_spooled_job(spool: Spool, config: ChatConfig, processes: int, *, show_progress: bool) -> Summary:
    """Sends every prompt of a spool; the outcomes are in its output folder.

    Args:
        spool: The job.
        config: How to ask.
        processes: Worker processes; 1 runs the job in this process.
        show_progress: Whether to draw a bar on standard error.

    Raises:
        RunStoppedError: The run is doomed; says why in one line.
        WorkerDiedError: A worker process is gone.
    """
    started_s = time.monotonic()
    with ExitStack() as stack:
        quiet = stack.enter_context(_short_logs())
        totals, address = _totals_of_this_process(), None
        run: Callable[[beam.Pipeline], Any] = _run_here
        if processes > 1:
            stack.enter_context(_WORKERS)
            let_workers_import_us()
            aside = _RunAside(spool.folder / _WANTED, quiet)
            run = aside.run
            totals, address = _receive_progress(stack, aside.stop)
        if show_progress:
            stack.enter_context(ProgressBar(totals, 0, spool.written, sys.stderr))
        try:
            result = run(build_pipeline(spool, config, processes, address))
        except WorkerDiedError:
            raise
        except (BeamLLMError, RuntimeError) as error:
            if _is_interrupt(error):
                raise KeyboardInterrupt from None
            # Beam adds to the text of what a step raised; what else it has to say it has logged.
            raise RunStoppedError(reason_of(error)) from None
    return summarise(result, time.monotonic() - started_s)


def build_pipeline(spool: Spool, config: ChatConfig, processes: int, progress_address: str | None) -> beam.Pipeline:
    """Read lines, put the pictures back, ask, write lines: only file ranges are shuffled.

    Args:
        spool, config, processes: As for `run_spooled_job`.
        progress_address: `host:port` that worker processes send their counts to; None = nowhere.
    """
    options = PipelineOptions([], num_workers=processes)
    settle_runner(options)
    pipeline = beam.Pipeline(options=options)
    _ = (
        pipeline
        | "ReadPrompts" >> ReadRequests([spool.pattern], InputFormat(Format.OPENAI_BATCH))
        | "RestorePictures" >> beam.ParDo(_RestorePictures(spool.folder, progress_address))
        | "ChatCompletion" >> ChatCompletion(config)
        | "WriteAnswers" >> WriteResults(spool.results, Format.OPENAI_BATCH)
    )
    return pipeline


class _RestorePictures(beam.DoFn):
    def __init__(self, folder: Path, progress_address: str | None) -> None:
        self._folder = folder
        self._restore = RestorePictures(folder)
        self._progress_address = progress_address

    def setup(self) -> None:
        """Lets a worker process show its progress, and end when nobody waits for its results any more.

        The address comes with the job: in the environment of the process that runs jobs, two of them would mix.
        """
        if self._progress_address is not None:
            os.environ[ADDRESS_ENV] = self._progress_address
            report_progress()
            threading.Thread(
                target=_end_with, args=(self._folder / _WANTED,), name="beam_llm-wanted", daemon=True
            ).start()

    def process(self, request: ChatRequest | FailedRequest) -> Iterator[ChatRequest | FailedRequest]:
        """The request with its pictures."""
        yield self._restore(request)


def _end_with(wanted: Path) -> None:
    """Ends this worker process once the file is gone; without a word, as whoever removed it knows why."""
    while wanted.exists():
        time.sleep(_LOOK_S)
    os._exit(0)


def _run_here(pipeline: beam.Pipeline) -> Any:
    result = pipeline.run()
    result.wait_until_finish()
    return result


class _RunAside:
    """Runs a pipeline with worker processes in another thread, which can be left when the run must end early.

    Beam waits for ever for a worker process that has died, or that had not come up when the run failed. Leaving works
    in every thread, for Ctrl-C too, and needs neither signals nor the end of this process, which is not ours.

    Args:
        wanted: A file to be; worker processes end when it goes.
        quiet: Set when Beam has nothing more to say that matters.
    """

    def __init__(self, wanted: Path, quiet: threading.Event) -> None:
        self._wanted = wanted
        self._quiet = quiet
        self._ends: SimpleQueue[Any] = SimpleQueue()

    def stop(self, reason: str) -> None:
        """Ends `run` with a RunStoppedError."""
        self._ends.put(RunStoppedError(reason))

    def run(self, pipeline: beam.Pipeline) -> Any:
        """As `_run_here`."""
        self._wanted.touch()
        thread = threading.Thread(target=self._run, args=(pipeline,), name="beam_llm-run", daemon=True)
        thread.start()
        try:
            end = None
            while end is None:
                with suppress(Empty):  # a timeout, as Windows does not wake for Ctrl-C without one
                    end = self._ends.get(timeout=1)
        finally:
            self._quiet.set()
            self._wanted.unlink()
            thread.join(_LEAVE_S)
        if isinstance(end, BaseException):
            raise end
        return end

    def _run(self, pipeline: beam.Pipeline) -> None:
        hook, others = threading.excepthook, set(threading.enumerate())

        def watch(args: threading.ExceptHookArgs) -> None:
            name = args.thread.name if args.thread is not None else ""
            if args.thread in others or not any(known in name for known in _BEAM_THREADS):
                hook(args)
            elif WORKER_THREAD in name:
                self._ends.put(
                    WorkerDiedError(f"a worker process died ({args.exc_value}): out of memory, or killed; ask again")
                )

        threading.excepthook = watch
        try:
            self._ends.put(_run_here(pipeline))
        except BaseException as error:
            self._ends.put(error)
        finally:
            if threading.excepthook is watch:
                threading.excepthook = hook


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether it is Ctrl-C, which Beam makes a RuntimeError of where it hits a step that runs in this thread."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _receive_progress(stack: ExitStack, on_stop: Callable[[str], None]) -> tuple[Callable[[], Counts], str]:
    """What worker processes have done so far, and the address that they send it to."""
    receiver = stack.enter_context(ProgressReceiver(on_stop))
    address = os.environ.pop(ADDRESS_ENV)
    return lambda: _without_bytes(receiver.totals()), address


def _totals_of_this_process() -> Callable[[], Counts]:
    """What this process has done since now."""
    before = replace(COUNTS)

    def since() -> Counts:
        return Counts(
            sent=COUNTS.sent - before.sent,
            open=COUNTS.open,
            completed=COUNTS.completed - before.completed,
            failed=COUNTS.failed - before.failed,
        )

    return since


def _without_bytes(counts: Counts) -> Counts:
    """The bar then goes by the number of prompts, which is known, instead of by the bytes read."""
    return replace(counts, bytes_read=0)


@contextmanager
def _short_logs() -> Iterator[threading.Event]:
    """Makes what Beam logs readable for the time of a job, see `shorten_record`; once the event is set, drops it."""
    quiet = threading.Event()

    def shorten(record: logging.LogRecord) -> bool:
        if record.name.startswith("apache_beam"):
            known = quiet.is_set() or (record.exc_info is not None and _is_interrupt(record.exc_info[1]))
            return not known and shorten_record(record)
        return shorten_record(record)

    logging.basicConfig()  # does nothing where logging is set up; else Beam would do it with its first warning
    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(shorten)
    try:
        yield quiet
    finally:
        for handler in handlers:
            handler.removeFilter(shorten)
