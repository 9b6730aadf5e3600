"""ChatCompletion: the PTransform that other pipelines compose, and what it shares with ValidateRequests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.io.components.rate_limiter import RateLimiter
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import FixedWindows, GlobalWindows, Sessions

from beam_llm import metrics
from beam_llm.config import ChatConfig
from beam_llm.dofn import FAILED_TAG, ChatCompletionDoFn, OutcomeCounts, Windowed
from beam_llm.encode_images import Batch, EncodeImages, picture_weight
from beam_llm.errors import ErrorKind
from beam_llm.images.encoder import process_encoder
from beam_llm.messages import count_images
from beam_llm.progress import COUNTS
from beam_llm.records import ChatRequest, Completion, FailedRequest

_ONE_WINDOW = (GlobalWindows, FixedWindows, Sessions)
"""Window functions that put an element into one window only."""


class ChatResults(NamedTuple):
    """The two outputs of `ChatCompletion`; together they hold one record for each request."""

    completed: beam.PCollection[Completion]
    failed: beam.PCollection[FailedRequest]


class ChatCompletion(beam.PTransform):
    """Asks an OpenAI-compatible endpoint each request of a PCollection.

    Input: `ChatRequest`; `FailedRequest`, which goes straight to `failed`; or anything else, with `to_request`.
    Output: `ChatResults(completed, failed)`, one record for each element, with its own timestamp and windows.
    Delivery: a request may be sent more than once when the runner replays a bundle. Order: none.

    Args:
        config: Where, what and how much at once.
        to_request: Makes a `ChatRequest` of an element. None: the elements are requests already. An element for which
            it raises, or returns anything else, becomes a `FailedRequest` of kind `bad_input` with the element as its
            context.
        rate_limiter: One of Beam's, for one limit over all workers; see `ChatCompletionDoFn`.

    Example:
        results = rows | ChatCompletion(ChatConfig(base_urls=("http://localhost:8000/v1",), model="m"), make_request)
        results.completed | beam.Map(lambda completion: (completion.custom_id, completion.answer))
    """

    def __init__(
        self,
        config: ChatConfig,
        to_request: Callable[[Any], ChatRequest] | None = None,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        super().__init__()
        self._config = config
        self._to_request = to_request
        self._rate_limiter = rate_limiter

    def expand(self, requests: beam.PCollection[Any]) -> ChatResults:
        """Captures each element's window, batches, encodes, sends: steps that runners fuse into one stage."""
        sent = _prepare(requests, self._config, self._to_request) | "SendRequests" >> beam.ParDo(
            ChatCompletionDoFn(self._config, self._rate_limiter)
        ).with_outputs(FAILED_TAG, main="completed")
        return ChatResults(sent.completed, sent[FAILED_TAG])


class ValidateRequests(beam.PTransform):
    """`ChatCompletion` without sending: everything is built and encoded, what cannot be sent is in `failed`.

    Output: `ChatResults` whose `completed` is empty; requests that could be sent are counted as `valid`.

    Args:
        config, to_request: As for `ChatCompletion`.
    """

    def __init__(self, config: ChatConfig, to_request: Callable[[Any], ChatRequest] | None = None) -> None:
        super().__init__()
        self._config = config
        self._to_request = to_request

    def expand(self, requests: beam.PCollection[Any]) -> ChatResults:
        """The steps of `ChatCompletion` up to the sending."""
        checked = _prepare(requests, self._config, self._to_request) | "CountValid" >> beam.ParDo(
            _CountValid()
        ).with_outputs(FAILED_TAG, main="completed")
        return ChatResults(checked.completed, checked[FAILED_TAG])


def _prepare(
    requests: beam.PCollection[Any], config: ChatConfig, to_request: Callable[[Any], ChatRequest] | None
) -> beam.PCollection[Batch]:
    return (
        requests
        | "CaptureWindows" >> beam.ParDo(_CaptureWindows(to_request))
        | "BatchRequests" >> _batching(requests, config)
        | "EncodeImages" >> beam.Map(EncodeImages(config)).with_output_types(Batch)
    )


class _CountValid(beam.DoFn):
    def setup(self) -> None:
        """Nothing has failed yet."""
        self._counted = OutcomeCounts()

    def process(self, batch: list[Windowed]) -> Iterator[Any]:
        """Counts what can be sent; yields the failures."""
        for value, wv in batch:
            if isinstance(value, FailedRequest):
                self._counted.add(value)
                yield TaggedOutput(FAILED_TAG, wv.with_value(value))
            else:
                COUNTS.completed += 1
                metrics.count(metrics.VALID)
        self._counted.flush()


class _CaptureWindows(beam.DoFn):
    """Element -> `Windowed` request: BatchElements forgets timestamps, windows and panes."""

    def __init__(self, to_request: Callable[[Any], ChatRequest] | None) -> None:
        self._to_request = to_request

    def process(self, element: Any, wv: Any = beam.DoFn.WindowedValueParam) -> Iterator[Windowed]:
        """Yields the element's request, or its failure, together with the element's windowed value."""
        yield Windowed(self._request(element), wv.with_value(None))

    def _request(self, element: Any) -> ChatRequest | FailedRequest:
        if isinstance(element, FailedRequest):
            return element
        if self._to_request is not None:
            return _made_request(self._to_request, element)
        if not isinstance(element, ChatRequest):
            raise TypeError(
                f"ChatCompletion takes ChatRequest, got {type(element).__name__}: pass to_request=, a function that "
                "makes a ChatRequest of your element"
            )
        return element


def _made_request(to_request: Callable[[Any], ChatRequest], element: Any) -> ChatRequest | FailedRequest:
    """What the user's function makes of an element. It may fail at a row in any way; the other rows go on."""
    made: Any
    try:
        made = to_request(element)
        if isinstance(made, (ChatRequest, FailedRequest)):
            return made
        reason = f"to_request returned {type(made).__name__} instead of a ChatRequest"
    except Exception as error:
        reason = f"to_request raised {type(error).__name__}: {error}"
    custom_id = str(element.get("custom_id") or "") if isinstance(element, Mapping) else ""
    return FailedRequest(custom_id, ErrorKind.BAD_INPUT, reason, context=element)


def _batching(requests: beam.PCollection[Any], config: ChatConfig) -> beam.PTransform:
    """Lists of a fixed size; lists of one where an element may be in several windows.

    BatchElements would learn its size from how long the next step takes, which says nothing about an asynchronous one;
    and it takes an element once for each of its windows, which would ask, and pay, each time.
    """
    if isinstance(requests.windowing.windowfn, _ONE_WINDOW):
        size = config.batch_size
        return beam.BatchElements(
            min_batch_size=size, max_batch_size=size, element_size_fn=_Weight(config), record_metrics=False
        )
    return beam.Map(_alone)


def _alone(item: Windowed) -> list[Windowed]:
    return [item]


class _Weight:
    """What a request counts in a batch: 1, or more if its pictures are large; never more than a whole batch.

    How large they are, the pictures before them tell.
    """

    def __init__(self, config: ChatConfig) -> None:
        self._config = config

    def __call__(self, item: Windowed) -> int:
        if isinstance(item.value, FailedRequest):
            return 1
        body = item.value.body
        images = count_images(body.get("messages")) if isinstance(body, (dict, Mapping)) else 0
        return picture_weight(images, process_encoder(self._config.images).mean_bytes, self._config.batch_size)
