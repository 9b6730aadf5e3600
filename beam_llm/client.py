"""ChatClient: one request through its attempts to exactly one outcome."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import aiohttp
from yarl import URL

from beam_llm.body import Body, BodyBuilder, PreparedRequest
from beam_llm.classify import classify_response
from beam_llm.config import ChatConfig
from beam_llm.connection import OneShotPayload, open_session, proxy_for
from beam_llm.endpoints import Endpoint, EndpointPool
from beam_llm.errors import ErrorKind, Verdict, classify_exception
from beam_llm.limits import InFlightLimit, RateLimit
from beam_llm.records import Completion, FailedRequest, Outcome
from beam_llm.retry import next_delay, parse_retry_after

_HEADERS = {"Content-Type": "application/json"}


class AttemptObserver(Protocol):
    """Who is told of every try: the driver, which counts and stops doomed runs."""

    def started(self) -> None:
        """A request is about to be sent."""

    def judged(self, verdict: Verdict) -> None:
        """A try ended."""


Weigh = Callable[[int], None]
"""Told how many bytes of a request's body are held and not yet written."""


@dataclass(slots=True)
class _Attempt:
    """What one try brought."""

    verdict: Verdict
    answer: dict[str, Any] | None = None
    status_code: int | None = None
    request_id: str | None = None
    retry_after_s: float | None = None
    latency_ms: float = 0.0


@dataclass(slots=True)
class _Course:
    """One request's way through its attempts."""

    prepared: PreparedRequest
    body: Body
    weigh: Weigh
    started_s: float
    attempts: int = 0
    retried: list[ErrorKind] = field(default_factory=list)


class ChatClient:
    """Sends requests over one session. Lives on one event loop.

    Args:
        config: Where and how.
        api_key: Bearer token; None sends none.
        limit: The process's in-flight limit. The caller takes a slot before `complete`, which gives it back.
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
        self._limit = limit
        self._observer = observer
        self._clock = clock
        self._rng = rng or random.Random()
        self._rate = RateLimit(config.requests_per_minute)
        self._endpoints = EndpointPool(config.base_urls)
        self._builder = BodyBuilder(config)
        self._targets: dict[str, tuple[URL, URL | None]] = {}
        self._session = open_session(
            max_connections=config.max_in_flight,
            connect_timeout_s=config.connect_timeout_s,
            read_timeout_s=config.read_timeout_s,
            api_key=api_key,
        )

    async def close(self) -> None:
        """Closes the session and its connections."""
        await self._session.close()

    async def complete(self, prepared: PreparedRequest, weigh: Weigh) -> Outcome:
        """One request through its attempts. Holds a slot while it is open, none while it waits to try again.

        Args:
            prepared: The request with its first body.
            weigh: Told the bytes of its body that are still to be written.

        Returns:
            The answer, or why there is none. Never raises for what a server or a network can do.
        """
        course = _Course(prepared, prepared.body, weigh, self._clock())
        while True:
            endpoint = self._endpoints.take()
            try:
                if isinstance(attempt := await self._attempt(course, endpoint), FailedRequest):
                    return attempt
            finally:
                self._endpoints.release(endpoint)
                self._limit.release()
            self._observer.judged(attempt.verdict)
            delay_s = None if attempt.verdict.kind is None else self._next_delay(course, attempt)
            if delay_s is None:
                return self._outcome(course, attempt, endpoint)
            course.retried.append(_kind(attempt.verdict))
            await asyncio.sleep(delay_s)
            await self._limit.retake()

    async def _pace(self) -> None:
        if (wait_s := self._rate.reserve(self._clock())) > 0:
            await asyncio.sleep(wait_s)

    async def _attempt(self, course: _Course, endpoint: Endpoint) -> _Attempt | FailedRequest:
        await self._pace()
        if course.body.data is None and (failed := await self._build_again(course)) is not None:
            return failed
        course.attempts += 1
        body = OneShotPayload(course.body, on_written=lambda: course.weigh(0))
        path = course.prepared.request.path
        url, proxy = self._target(endpoint, path)
        started_s = self._clock()
        timeout = self._timeout(course, started_s)
        self._observer.started()
        try:
            async with self._session.post(
                url,
                data=body,
                headers=_HEADERS,
                allow_redirects=False,
                timeout=timeout,
                proxy=proxy,
            ) as response:
                raw = await response.read()
                verdict, answer = classify_response(
                    response.status, raw, path=path, should_retry=response.headers.get("x-should-retry")
                )
                attempt = _Attempt(verdict, answer, response.status, response.headers.get("x-request-id"))
                if verdict.kind is not None:
                    attempt.retry_after_s = parse_retry_after(response.headers, time.time())
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            attempt = _Attempt(classify_exception(error, sent=body.written, timeout=timeout))
        finally:
            course.weigh(0)
        attempt.latency_ms = (self._clock() - started_s) * 1000
        return attempt

    def _target(self, endpoint: Endpoint, path: str) -> tuple[URL, URL | None]:
        text = endpoint.url(path)
        if text not in self._targets:
            url = URL(text)
            self._targets[text] = url, proxy_for(url)
        return self._targets[text]

    def _timeout(self, course: _Course, now_s: float) -> aiohttp.ClientTimeout:
        timeout = self._session.timeout
        if self._config.deadline_s is None:
            return timeout
        left_s = max(0.001, course.started_s + self._config.deadline_s - now_s)
        return aiohttp.ClientTimeout(
            total=min(left_s, timeout.total or left_s), sock_connect=timeout.sock_connect, sock_read=timeout.sock_read
        )

    def _next_delay(self, course: _Course, attempt: _Attempt) -> float | None:
        kinds = [*course.retried, attempt.verdict.kind]
        deadline_s = self._config.deadline_s
        return next_delay(
            attempt.verdict,
            course.attempts,
            attempt.retry_after_s,
            self._config.retry,
            self._rng,
            disconnects=kinds.count(ErrorKind.DISCONNECTED),
            remaining_s=None if deadline_s is None else course.started_s + deadline_s - self._clock(),
        )

    async def _build_again(self, course: _Course) -> FailedRequest | None:
        loop = asyncio.get_running_loop()
        again = await loop.run_in_executor(None, self._builder.prepare, course.prepared.request)
        if isinstance(again, FailedRequest):
            return replace(again, attempts=course.attempts, retried=tuple(course.retried))
        course.body = again.body
        course.weigh(again.body.size)
        return None

    def _outcome(self, course: _Course, attempt: _Attempt, endpoint: Endpoint) -> Outcome:
        request = course.prepared.request
        verdict = attempt.verdict
        if verdict.kind is None and attempt.answer is not None:
            return Completion(
                custom_id=request.custom_id,
                body=attempt.answer,
                status_code=attempt.status_code or 200,
                request_id=attempt.request_id,
                attempts=course.attempts,
                latency_ms=attempt.latency_ms,
                endpoint=endpoint.base_url,
                context=request.context,
                origin=request.origin,
                retried=tuple(course.retried),
                request_bytes=course.body.size,
            )
        return FailedRequest(
            custom_id=request.custom_id,
            kind=_kind(verdict),
            message=verdict.message,
            status_code=attempt.status_code,
            body=verdict.excerpt,
            request_id=attempt.request_id,
            attempts=course.attempts,
            latency_ms=attempt.latency_ms,
            endpoint=endpoint.base_url,
            context=request.context,
            origin=request.origin,
            retried=tuple(course.retried),
            request_bytes=course.body.size,
        )


def _kind(verdict: Verdict) -> ErrorKind:
    return verdict.kind or ErrorKind.INVALID_RESPONSE
