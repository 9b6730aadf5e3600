"""What the tests of the Beam side share: options of real runners, what workers import, a sink to look into."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import apache_beam as beam
from aiohttp import web
from apache_beam.metrics import MetricsFilter
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms.window import TimestampedValue

from beam_llm.config import ChatConfig
from beam_llm.metrics import NAMESPACE
from beam_llm.records import ChatRequest
from beam_llm.retry import RetryPolicy
from beam_llm.runner import settle_runner
from tests.endpoint import ScriptedEndpoint

ROOT = Path(__file__).resolve().parent.parent

QUICK = RetryPolicy(max_retries=3, initial_backoff_s=0.001, max_backoff_s=0.002)


def config(endpoint: ScriptedEndpoint, **settings: Any) -> ChatConfig:
    return ChatConfig(base_urls=(endpoint.base_url,), model="m", retry=settings.pop("retry", QUICK), **settings)


def local(num_workers: int = 1, *flags: str) -> PipelineOptions:
    """Options as the command line settles them: FnApiRunner, or Beam's streaming runner for a TestStream."""
    options = PipelineOptions(["--runner=DirectRunner", f"--num_workers={num_workers}", *flags])
    settle_runner(options)
    return options


def counters(result: Any) -> dict[str, int]:
    """Our counters after a run, summed over all steps."""
    totals: dict[str, int] = {}
    for found in result.metrics().query(MetricsFilter().with_namespace(NAMESPACE))["counters"]:
        totals[found.key.metric.name] = totals.get(found.key.metric.name, 0) + found.committed
    return totals


def refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def ask(text: str) -> ChatRequest:
    return ChatRequest(text, {"messages": text})


def ask_with_pid(text: str) -> ChatRequest:
    """Says in the body which worker process sends it."""
    return ChatRequest(text, {"messages": text, "user": str(os.getpid())})


def ask_row(row: dict[str, Any]) -> ChatRequest:
    """A user's own function: raises KeyError for a row without a body, and returns None for one that says "skip"."""
    body = row["body"]
    return None if body == "skip" else ChatRequest(row["custom_id"], body, context=row)  # type: ignore[return-value]


def timed(texts: list[str]) -> beam.PTransform:
    """Texts such as "a@12": elements with their second as timestamp."""
    return beam.Create([TimestampedValue(text, int(text.partition("@")[2])) for text in texts])


def stream(*bundles: list[str]) -> TestStream:
    """A bundle for each list; the watermark then advances past its last element."""
    events = TestStream()
    for texts in bundles:
        seconds = [int(text.partition("@")[2]) for text in texts]
        events = events.add_elements(
            [TimestampedValue(text, second) for text, second in zip(texts, seconds, strict=True)]
        )
        events = events.advance_watermark_to(max(seconds) + 1)
    return events.advance_watermark_to_infinity()


def bounds(wv: Any) -> list[tuple[int, int]]:
    return sorted((int(window.start), int(window.end)) for window in wv.windows)


class Gathered(beam.DoFn):
    """Keeps every element, with timestamp, windows and pane, for a test to look at.

    Beam pickles DoFns; within this process a copy is the same object again.
    """

    _all: ClassVar[WeakValueDictionary[int, Gathered]] = WeakValueDictionary()
    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self) -> None:
        self._number = next(self._numbers)
        self._lock = threading.Lock()
        self.windowed: list[Any] = []
        self._all[self._number] = self

    def __reduce__(self) -> Any:
        return _gathered, (self._number,)

    def process(self, element: Any, wv: Any = beam.DoFn.WindowedValueParam) -> None:
        with self._lock:
            self.windowed.append(wv)

    @property
    def values(self) -> list[Any]:
        return [wv.value for wv in self.windowed]


def _gathered(number: int) -> Gathered:
    return Gathered._all[number]


class FailOnce(beam.DoFn):
    """Passes elements on, but raises once, at the element number `at` of the first bundle that gets so far."""

    _raised: ClassVar[set[str]] = set()

    def __init__(self, name: str, at: int) -> None:
        self._name = name
        self._at = at

    def start_bundle(self) -> None:
        self._seen = 0

    def process(self, element: Any) -> Any:
        self._seen += 1
        if self._seen > self._at and self._name not in self._raised:
            self._raised.add(self._name)
            raise OSError("disk full")
        yield element
