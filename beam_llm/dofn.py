"""ChatCompletionDoFn: batches of prepared requests in, outcomes out as they finish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.io.components.rate_limiter import RateLimiter
from apache_beam.pvalue import TaggedOutput

from beam_llm import metrics
from beam_llm.body import BodyBuilder, PreparedRequest
from beam_llm.channel import Channel, Result
from beam_llm.config import ChatConfig
from beam_llm.driver import Driver
from beam_llm.process_drivers import acquire_driver, release_driver
from beam_llm.progress import COUNTS, show_failure
from beam_llm.records import ChatRequest, Completion, FailedRequest, Outcome

FAILED_TAG = "failed"
"""Tag of the failed requests; completions are the main output."""


class Windowed(NamedTuple):
    """A batch's item together with the windowed value of the element that it comes from."""

    value: Any
    wv: Any


class ChatCompletionDoFn(beam.DoFn):
    """Sends batches of requests and emits whatever has finished, from this batch or any earlier one of the bundle.

    Input: lists, as BatchElements makes them. An item is a `PreparedRequest` or `FailedRequest` (what `EncodeImages`
    makes), a plain `ChatRequest`, or a `Windowed` with one of these, whose outcome then leaves with the timestamp and
    the windows of its own element instead of the batch's.

    Output: `Completion` on the main output, `FailedRequest` on the tag `failed`; exactly one for each request. No
    order. A request may be sent again when the runner replays a bundle.

    There is no wait at a batch's edge: `process` returns as soon as another batch may come, `finish_bundle` waits for
    the rest. A request never raises; a doomed run does (`RunStoppedError`).

    Args:
        config: Where and how to send; without secrets, since it is pickled into the job.
        rate_limiter: One of Beam's, such as `EnvoyRateLimiter`, for a limit over all workers: asked for each batch, as
            many hits as it has requests to send. Retries are not asked for. None: only the config's own limits.
    """

    def __init__(self, config: ChatConfig, rate_limiter: RateLimiter | None = None) -> None:
        self._config = config
        self._rate_limiter = rate_limiter

    def setup(self) -> None:
        """Joins, or starts, the driver of this worker process: loop thread, aiohttp session, limits."""
        self._driver: Driver | None = acquire_driver(self._config)
        self._builder = BodyBuilder(self._config)
        self._channel: Channel | None = None
        self._counted = OutcomeCounts()

    def start_bundle(self) -> None:
        """Opens a channel; what a failed bundle left is dropped."""
        if self._channel is not None:
            self._channel.abandon()
        assert self._driver is not None, "setup() has not been called"
        self._channel = self._driver.channel()
        self._counted.forget()
        self._held: list[Result] = []

    def process(self, batch: list[Any], wv: Any = beam.DoFn.WindowedValueParam) -> Iterator[Any]:
        """Submits a batch and emits what has finished, waiting only while the in-flight limit is reached."""
        self._record_driver()
        results = self._advance(batch, wv)
        if len(wv.windows) == 1:
            yield from self._emit(results)
        else:
            # Beam 2.77 multiplies the windows of what process() emits by the number of windows of the current
            # element (_maybe_propagate_windowing_info); what finish_bundle() emits it takes as it is.
            self._held.extend(results)

    def finish_bundle(self) -> Iterator[Any]:
        """Waits for everything that is still open and emits it."""
        channel = self._open_channel()
        yield from self._emit(self._held)
        yield from self._emit(channel.poll())
        while channel.pending:
            yield from self._emit(channel.wait(for_room=False))
        self._record_driver()
        self._channel = None

    def teardown(self) -> None:
        """Leaves the driver, which drops what a failed bundle left; the last user closes it, thread and session."""
        if self._driver is not None:
            if self._channel is not None:
                self._channel.abandon()
            release_driver(self._driver)
            self._driver = None

    def _record_driver(self) -> None:
        """Counts what the driver has seen since the last call, by whichever bundle."""
        assert self._driver is not None, "setup() has not been called"
        metrics.record_throttled(self._driver.take_throttled_seconds())
        metrics.record_failed_tries(self._driver.take_failures())

    def _emit(self, results: Iterable[Result]) -> Iterator[Any]:
        for wv, outcome in results:
            self._counted.add(outcome)
            out = wv.with_value(outcome)
            yield out if isinstance(outcome, Completion) else TaggedOutput(FAILED_TAG, out)
        self._counted.flush()

    def _open_channel(self) -> Channel:
        assert self._channel is not None, "start_bundle() has not been called"
        return self._channel

    def _advance(self, batch: list[Any], batch_wv: Any) -> Iterator[Result]:
        channel = self._open_channel()
        requests = []
        for token, item in (self._unwrap(item, batch_wv) for item in batch):
            if isinstance(item, FailedRequest):
                yield token, item
            else:
                requests.append((token, item))
        assert self._driver is not None, "setup() has not been called"
        answers = self._driver.find_answers([prepared for _, prepared in requests])
        yield from ((token, answer) for (token, _), answer in zip(requests, answers, strict=True) if answer is not None)
        missing = [request for request, answer in zip(requests, answers, strict=True) if answer is None]
        if missing and self._rate_limiter is not None:
            while not self._rate_limiter.allow(hits_added=len(missing)):
                yield from channel.wait(for_room=False)
        channel.submit(missing)
        yield from channel.poll()
        while not channel.has_room():
            yield from channel.wait(for_room=True)

    def _unwrap(self, item: Any, batch_wv: Any) -> tuple[Any, PreparedRequest | FailedRequest]:
        value, wv = item if isinstance(item, Windowed) else (item, batch_wv)
        return wv, self._builder.prepare(value) if isinstance(value, ChatRequest) else value


class OutcomeCounts:
    """Adds outcomes to Beam's metrics and to the live progress; on the bundle's thread."""

    def __init__(self) -> None:
        self._tally = metrics.Tally()
        self._examples: dict[str, str] = {}

    def add(self, outcome: Outcome) -> None:
        """Counts one request's outcome; Beam learns of it with the next `flush`."""
        self._tally.record(outcome)
        if isinstance(outcome, Completion):
            COUNTS.completed += 1
        else:
            COUNTS.failed += 1
            metrics.record_example(outcome, self._examples)
            show_failure(outcome)

    def forget(self) -> None:
        """Drops what a failed bundle left."""
        self._tally = metrics.Tally()

    def flush(self) -> None:
        """Before the bundle's call ends, as Beam takes counts from its own thread only."""
        self._tally.flush()
