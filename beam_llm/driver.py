"""The event loop thread of a worker process and what it owns; bundles use it through plain blocking calls.

One driver per process and config: however many bundles run at once, they share its session and its limits, and each
gets back its own outcomes through its own `Channel`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from beam_llm.api_key import read_api_key
from beam_llm.body import PreparedRequest
from beam_llm.channel import Channel, Job
from beam_llm.client import ChatClient
from beam_llm.config import ChatConfig
from beam_llm.course import Attempt, Course
from beam_llm.errors import ErrorKind, RunStoppedError
from beam_llm.limits import InFlightLimit
from beam_llm.process_limits import allow_connections, collect_garbage_less_often, return_large_buffers
from beam_llm.progress import COUNTS, report_stop, show_failure
from beam_llm.records import Completion, FailedRequest, Outcome
from beam_llm.stopping import FIRST_REQUESTS, FIRST_WAIT_S, AllAlike, StopRule
from beam_llm.stored_answers import StoredAnswers
from beam_llm.stores import open_store

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""How long a closing driver waits for its connections; the process may be on its way out."""

_STOP_S = 10.0
"""How long a bundle thread of a doomed run waits for the command line to end the run before it raises itself: Beam
prints an exception six times over, and only when the partitions before it have ended."""

_SHOWN_TRIES = 3
"""Tries of one request that must fail before their reason is shown while it is still sent again."""

_LIVE_PER_SLOT = 2
"""Requests begun, per slot: those that wait to try again hold no slot, but there must be an end to them."""


class Driver:
    """Owns the loop thread, the client, the in-flight limit and the rule that stops a doomed run."""

    def __init__(self, config: ChatConfig) -> None:
        self.config = config
        self.unsent_bytes = 0
        self.stopped: str | None = None
        self._closing = False
        self._queue: deque[Job] = deque()
        self._tasks: dict[asyncio.Task[None], Job] = {}
        self._waiting: set[Channel] = set()
        self._stop_rule = StopRule()
        self._all_alike = AllAlike()
        self._failures_taken: Counter[str] = Counter()
        self._taking = threading.Lock()
        self._limit = InFlightLimit(min(FIRST_REQUESTS, config.max_in_flight), self._pump)
        self._api_key = read_api_key(config.api_key_env, config.api_key_secret)
        allow_connections(config.max_in_flight)
        collect_garbage_less_often()
        return_large_buffers()
        self._loop = _new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="beam_llm-loop", daemon=True)
        self._thread.start()
        self._answers = _answers(config)
        try:
            self._client = self._call(self._open())
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise
        _LOGGER.info("beam_llm: %d requests at once to %s", config.max_in_flight, ", ".join(config.base_urls))

    # Called on bundle threads.

    def channel(self) -> Channel:
        """A new channel for one bundle."""
        return Channel(self)

    def accept(self, jobs: list[Job]) -> None:
        """Hands jobs to the loop with one wake-up."""
        self._loop.call_soon_threadsafe(self._accept, jobs)

    def find_answers(self, requests: list[PreparedRequest]) -> list[Completion | None]:
        """The stored answer of each request of a batch, in order; None where there is none."""
        if self._answers is None or self._closing or not requests:
            return [None] * len(requests)
        return self._call(self._answers.find(requests))

    def take_throttled_seconds(self) -> int:
        """Whole seconds, since the last call, in which requests were held back by limits, pauses or cool-downs."""
        return self._limit.throttle.take_seconds()

    def take_failures(self) -> dict[str, int]:
        """Tries that failed since the last call, by the base URL that they were sent to."""
        with self._taking:  # the loop thread only ever adds to an endpoint's count
            new = Counter({e.base_url: e.failures for e in self._client.endpoints}) - self._failures_taken
            self._failures_taken += new
        return new

    def abandon(self, channel: Channel) -> None:
        """Drops what a failed bundle left: queued requests are not sent, open ones are cancelled."""
        self._loop.call_soon_threadsafe(self._abandon, channel)

    def check(self) -> None:
        """Raises what makes further waiting pointless.

        Raises:
            RunStoppedError: The run is doomed, or the loop thread is gone.
        """
        if self.stopped is not None:
            if report_stop(self.stopped):
                time.sleep(_STOP_S)
            raise RunStoppedError(self.stopped)
        if not self._thread.is_alive():
            raise RunStoppedError("the event loop of this worker process has ended; see the log above")

    def close(self) -> None:
        """Cancels what is open, closes the session, ends the thread. Safe to call twice."""
        if not self._loop.is_closed():
            try:
                self._call(self._close(), _CLOSE_S)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(_CLOSE_S)
                if not self._thread.is_alive():
                    self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    # Called on the loop thread.

    async def _open(self) -> ChatClient:
        if self._answers is not None:
            await self._answers.open()
        self._loop.call_later(FIRST_WAIT_S, self._open_limit)
        return ChatClient(self.config, self._api_key, self._limit, self)

    async def _close(self) -> None:
        self._closing = True  # a run that ends on an error tears its workers down while their bundles still submit
        self._queue.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()
        if self._answers is not None:
            await self._answers.close()

    def _accept(self, jobs: list[Job]) -> None:
        if self.stopped is not None or self._closing:
            return
        for job in jobs:
            self._weigh(job, job.prepared.body.size)
        self._queue.extend(jobs)
        self._pump()

    def _weigh(self, job: Job, size: int) -> None:
        self.unsent_bytes += size - job.unsent_bytes
        job.unsent_bytes = size
        if not size:
            for channel in list(self._waiting):
                self._wake_if_room(channel)

    def _pump(self) -> None:
        """Starts queued requests while slots are free."""
        while self._queue and len(self._tasks) < _LIVE_PER_SLOT * self._limit.ceiling:
            if self._queue[0].channel.abandoned:
                self._weigh(self._queue.popleft(), 0)
                continue
            if not self._limit.try_take():
                break
            job = self._queue.popleft()
            task = self._loop.create_task(self._run(job))
            self._tasks[task] = job
            task.add_done_callback(self._ended)
            job.channel.begun += 1
            self._wake_if_room(job.channel)

    async def _run(self, job: Job) -> None:
        job.begun = True
        try:
            outcome: Outcome = await self._client.complete(job.prepared, partial(self._weigh, job))
            if self._answers is not None and job.prepared.key is not None and isinstance(outcome, Completion):
                outcome = await self._answers.keep(job.prepared.key, outcome)
        except Exception as error:
            # A fault of ours must not cost the row, nor the bundle the rows beside it.
            _LOGGER.exception("beam_llm: unexpected error for %s", job.prepared.request.custom_id)
            outcome = _unexpected(job.prepared, error)
        job.channel.deliver(job.token, outcome)
        self._wake_soon(job.channel)

    def _ended(self, task: asyncio.Task[None]) -> None:
        job = self._tasks.pop(task)
        if not job.begun:  # cancelled before its first step: nobody else gives its slot back
            self._limit.release()
        self._weigh(job, 0)
        COUNTS.open = self._limit.open
        self._pump()

    def _abandon(self, channel: Channel) -> None:
        for task, job in self._tasks.items():
            if job.channel is channel:
                task.cancel()

    # AttemptObserver: told by the client of every try.

    def started(self, course: Course) -> None:
        """Counts a request that goes out."""
        COUNTS.sent += 1
        COUNTS.open = self._limit.open
        self._all_alike.sent(id(course))

    def judged(self, course: Course, attempt: Attempt) -> None:
        """Feeds the stop rules; the first answer opens the limit."""
        verdict = attempt.verdict
        self._all_alike.observe(id(course), verdict, course.base_url)
        COUNTS.suspicion = self._all_alike.suspicion
        if verdict.retryable and course.attempts == _SHOWN_TRIES:
            show_failure(course.failure(attempt))
        if self._stop_rule.observe(verdict, self._loop.time(), course.base_url) is not None:
            self._stop()
        elif self._stop_rule.answered:
            self._open_limit()

    def _open_limit(self) -> None:
        refused = self._stop_rule.refusals
        if self._limit.ceiling < self.config.max_in_flight and (self._stop_rule.answered or not refused):
            self._limit.raise_ceiling(self.config.max_in_flight)

    def _stop(self) -> None:
        if self.stopped is None:
            self.stopped = self._stop_rule.reason
            self._queue.clear()
            for task in list(self._tasks):
                task.cancel()
            for channel in list(self._waiting):
                channel.wake()

    # Waking bundle threads: seldom, since each wake-up costs a change of threads.

    def wait_for(self, channel: Channel) -> None:
        """The channel's bundle thread is about to sleep."""
        self._waiting.add(channel)

    def awake(self, channel: Channel) -> None:
        """The channel's bundle thread runs again."""
        self._waiting.discard(channel)

    def _wake_if_room(self, channel: Channel) -> None:
        if channel in self._waiting and channel.wants_room and channel.has_room():
            channel.wake()

    def _wake_soon(self, channel: Channel) -> None:
        if channel in self._waiting and not channel.waking:
            channel.waking = True
            self._loop.call_later(0.005, channel.wake)


def _unexpected(prepared: PreparedRequest, error: Exception) -> FailedRequest:
    request = prepared.request
    return FailedRequest(
        custom_id=request.custom_id,
        kind=ErrorKind.INTERNAL,
        message=f"{type(error).__name__}: {error}"[:500],
        context=request.context,
        origin=request.origin,
    )


def _answers(config: ChatConfig) -> StoredAnswers | None:
    if config.response_store is None:
        return None
    return StoredAnswers(open_store(os.path.expandvars(config.response_store)), config.stored_finish_reasons)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
