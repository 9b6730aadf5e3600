"""ChatClient: one request through its attempts to exactly one outcome."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import aiohttp
from yarl import URL

from beam_llm.answers import judge_answer
from beam_llm.body import BodyBuilder, PreparedRequest
from beam_llm.classify import classify_response
from beam_llm.config import ChatConfig
from beam_llm.connection import OneShotPayload, open_session, proxy_for
from beam_llm.course import Attempt, Course, Weigh, why_no_key, with_what_was_sent
from beam_llm.endpoints import Endpoint, EndpointPool, Lease
from beam_llm.errors import Allowed, ErrorKind, Verdict, classify_exception
from beam_llm.limits import InFlightLimit
from beam_llm.pacing import Pacer, estimate_tokens
from beam_llm.records import FailedRequest, Outcome
from beam_llm.retry import EMPTY_KINDS, next_delay, parse_retry_after
from beam_llm.watch import Watch, Watched, takes_cancellation

_HEADERS = {"Content-Type": "application/json"}


class AttemptObserver(Protocol):
    """Who is told of every try: the driver, which counts and stops doomed runs."""

    def started(self, course: Course) -> None:
        """A request is about to be sent."""

    def judged(self, course: Course, attempt: Attempt) -> None:
        """A try ended."""


class ChatClient:
    """Sends requests over one session. Lives on one event loop.

    Args:
        config: Where and how.
        api_key: Bearer token; None sends none.
        limit: The process's in-flight limit. The caller takes a slot before `complete`, which gives it back. It is
            lowered here to what the endpoints can take.
        observer: Told of every try.
        clock: Seconds, monotonic.
        rng: For jitter.
    """

    def __init__(
        self,
        config: ChatConfig,
        api_key: str | None,
        limit: InFlightLimit,
        observer: AttemptObserver,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._no_key = why_no_key(config) if api_key is None else None
        self._limit = limit
        self._observer = observer
        self._clock = clock
        self._rng = rng or random.Random()
        self._pacer = Pacer(config.requests_per_minute, config.tokens_per_minute, limit.throttle, clock)
        self._endpoints = EndpointPool(config.base_urls, limit)
        self._reopening: asyncio.TimerHandle | None = None
        self._builder = BodyBuilder(config)
        self._targets: dict[str, tuple[URL, URL | None]] = {}
        self._session = open_session(
            max_connections=config.max_in_flight,
            connect_timeout_s=config.connect_timeout_s,
            api_key=api_key,
        )
        shortest_s = min(config.connect_timeout_s + 2 * config.read_timeout_s, config.deadline_s or math.inf)
        self._watch = Watch(config.read_timeout_s, shortest_s, clock)

    @property
    def endpoints(self) -> list[Endpoint]:
        """The endpoints with their counts of tries."""
        return self._endpoints.endpoints

    async def close(self) -> None:
        """Closes the session and its connections."""
        if self._reopening is not None:
            self._reopening.cancel()
        self._watch.close()
        await self._session.close()

    async def complete(self, prepared: PreparedRequest, weigh: Weigh) -> Outcome:
        """One request through its tries. Holds a slot while it is open, none while it waits to try again.

        Args:
            prepared: The request with its first body.
            weigh: Told the bytes of its body that are still to be written.

        Returns:
            The answer, or why there is none. Never raises for what a server or a network can do.
        """
        course = Course(prepared, prepared.body, weigh)
        if self._pacer.counts_tokens:
            course.tokens = self._estimate(prepared)
        try:
            ready = await self._make_ready(course)
            while isinstance(ready, Lease):
                attempt = await self._try(course, ready)
                delay_s = None if attempt.verdict.kind is None else self._next_delay(course, attempt)
                again = None if delay_s is None else await self._make_ready_in_time(course, delay_s)
                if again is None:
                    return course.outcome(attempt)
                course.retried.append(attempt.kind)
                ready = again
            return replace(ready, attempts=course.attempts, retried=tuple(course.retried))
        finally:
            self._give_slot_back(course)

    # What a try needs.

    async def _make_ready(self, course: Course, delay_s: float = 0.0) -> Lease | FailedRequest:
        """After the delay, gets what a try needs: a slot, a body, its turn by the rate limits, an endpoint."""
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        while True:
            if not course.holds_slot:
                await self._limit.retake()
                course.holds_slot = True
            if course.body.pieces is None and (failed := await self._build_again(course)) is not None:
                return failed
            if self._pacer.limits:
                await self._pacer.wait(course.tokens, returning=course.attempts > 0)
            if (lease := self._endpoints.take(self._clock(), course.endpoint)) is not None:
                return lease
            self._adapt()  # or the slot would come back at once
            self._give_slot_back(course)

    async def _make_ready_in_time(self, course: Course, delay_s: float) -> Lease | FailedRequest | None:
        """As `_make_ready`; None if the deadline is over before that."""
        if course.ends_s is None:
            return await self._make_ready(course, delay_s)
        try:
            return await asyncio.wait_for(self._make_ready(course, delay_s), course.ends_s - self._clock())
        except asyncio.TimeoutError:
            return None

    async def _build_again(self, course: Course) -> FailedRequest | None:
        loop = asyncio.get_running_loop()
        again = await loop.run_in_executor(None, self._builder.prepare, course.prepared.request)
        if isinstance(again, FailedRequest):
            return again
        course.body = again.body
        course.weigh(again.body.size)
        return None

    def _give_slot_back(self, course: Course) -> None:
        if course.holds_slot:
            course.holds_slot = False
            self._limit.release()

    def _adapt(self) -> None:
        """Fits the in-flight limit to the endpoints, now and when the next one opens again."""
        now_s = self._clock()
        self._endpoints.adapt(now_s)
        if self._reopening is not None:
            self._reopening.cancel()
            self._reopening = None
        if (wait_s := self._endpoints.opens_in_s(now_s)) is not None:
            self._reopening = asyncio.get_running_loop().call_later(max(wait_s, 0.001), self._adapt)

    # One try.

    async def _try(self, course: Course, lease: Lease) -> Attempt:
        """Sends the request, lets the endpoint and the slot go, and tells everyone what came of it."""
        course.attempts += 1
        course.endpoint = lease.endpoint
        if course.ends_s is None and self._config.deadline_s is not None:
            course.ends_s = lease.taken_s + self._config.deadline_s
        try:
            attempt = await self._send(course, lease)
            if self._endpoints.judged(lease, attempt.verdict, attempt.retry_after_s, self._clock()):
                attempt.retry_after_s = None  # the pause holds this request back too, or another endpoint takes it
        finally:
            self._endpoints.release(lease)
            if self._endpoints.strained:
                self._adapt()
            self._give_slot_back(course)
        if self._pacer.counts_tokens:
            self._settle(course, attempt)
        self._observer.judged(course, attempt)
        return attempt

    async def _send(self, course: Course, lease: Lease) -> Attempt:
        allowed = self._allowed(course, lease.taken_s)
        watched = self._watch.begin(lease.taken_s, lease.taken_s + (allowed.total_s or math.inf))
        body = OneShotPayload(course.body, on_written=partial(self._written, course, lease, watched))
        self._observer.started(course)
        try:
            attempt = await self._exchange(course, lease, body, watched)
        except asyncio.CancelledError:
            if watched.over is None or not takes_cancellation(watched):
                raise
            attempt = Attempt(self._judge(course, classify_exception(watched.over, sent=body.written, allowed=allowed)))
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            attempt = Attempt(self._judge(course, classify_exception(error, sent=body.written, allowed=allowed)))
        finally:
            self._watch.end(watched)
            course.weigh(0)
        attempt.latency_ms = (self._clock() - lease.taken_s) * 1000
        return attempt

    async def _exchange(self, course: Course, lease: Lease, body: OneShotPayload, watched: Watched) -> Attempt:
        path = course.prepared.request.path
        url, proxy = self._target(lease.endpoint, path)
        async with self._session.post(url, data=body, headers=_HEADERS, allow_redirects=False, proxy=proxy) as response:
            watched.silent_since_s = self._clock()
            raw = await response.content.readany()
            while not response.content.at_eof():
                watched.silent_since_s = self._clock()
                raw += await response.content.readany()
        verdict, answer = classify_response(
            response.status, raw, path=path, should_retry=response.headers.get("x-should-retry")
        )
        if verdict.kind is None and answer is not None:
            verdict = judge_answer(answer, self._config.fail_on) or verdict
        verdict = with_what_was_sent(verdict, str(url), course.body.size, self._no_key)
        attempt = Attempt(verdict, answer, response.status, response.headers.get("x-request-id"))
        if verdict.kind is not None:
            attempt.retry_after_s = self._told(parse_retry_after(response.headers, time.time()))
        return attempt

    def _written(self, course: Course, lease: Lease, watched: Watched) -> None:
        watched.silent_since_s = self._clock()
        course.weigh(0)
        if lease.endpoint.probe is lease:
            lease.endpoint.reached(lease)
            self._adapt()

    def _target(self, endpoint: Endpoint, path: str) -> tuple[URL, URL | None]:
        text = endpoint.url(path)
        if text not in self._targets:
            url = URL(text)
            self._targets[text] = url, proxy_for(url)
        return self._targets[text]

    def _allowed(self, course: Course, now_s: float) -> Allowed:
        config = self._config
        total_s = config.connect_timeout_s + 2 * config.read_timeout_s
        if course.ends_s is not None:
            total_s = min(max(0.001, course.ends_s - now_s), total_s)
        return Allowed(config.connect_timeout_s, config.read_timeout_s, total_s)

    def _judge(self, course: Course, verdict: Verdict) -> Verdict:
        """A try that ran into the deadline, and not into a limit of its own, says so."""
        if verdict.kind is not ErrorKind.TIMEOUT or course.ends_s is None or self._clock() < course.ends_s - 0.005:
            return verdict
        text = f"deadline_s={self._config.deadline_s:g} was over: {verdict.message}"
        return replace(verdict, kind=ErrorKind.DEADLINE, retryable=False, message=text)

    def _told(self, retry_after_s: float | None) -> float | None:
        return None if retry_after_s is None else min(retry_after_s, self._config.retry.max_retry_after_s)

    def _next_delay(self, course: Course, attempt: Attempt) -> float | None:
        kinds = [*course.retried, attempt.verdict.kind]
        return next_delay(
            attempt.verdict,
            course.attempts,
            attempt.retry_after_s,
            self._config.retry,
            self._rng,
            disconnects=kinds.count(ErrorKind.DISCONNECTED),
            empties=sum(kinds.count(kind) for kind in EMPTY_KINDS),
            remaining_s=None if course.ends_s is None else course.ends_s - self._clock(),
        )

    # Tokens per minute.

    def _estimate(self, prepared: PreparedRequest) -> float:
        default = self._config.sampling.max_tokens
        return estimate_tokens(prepared.request.body, prepared.body.size, prepared.images, default)

    def _settle(self, course: Course, attempt: Attempt) -> None:
        """What the server counted takes the place of the estimate; without a count the estimate stays."""
        used = 0 if attempt.verdict.kind is ErrorKind.CONNECT else attempt.total_tokens()
        if used is not None:
            self._pacer.settle(course.tokens, used)
