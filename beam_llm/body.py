"""From a ChatRequest to the bytes that are posted: defaults filled in, messages built, images encoded."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from beam_llm.config import ChatConfig
from beam_llm.errors import RequestError
from beam_llm.fingerprint import picture_hash, request_key
from beam_llm.images import DataURL
from beam_llm.images.encoder import process_encoder
from beam_llm.jsontext import dumps
from beam_llm.messages import Message, image_references, replace_images, to_messages
from beam_llm.records import ChatRequest, FailedRequest
from beam_llm.sampling import merge_fields, place_fields

_MARK = f"beam_llm-picture-{uuid.uuid4().hex}-"
"""Stands for a picture until the JSON around it is written; nobody can have written it before."""


class Body:
    """The JSON of one request until it has been sent; then `release` lets its bytes go, whoever still holds the object.

    An answer takes seconds to minutes, so thousands of open requests would otherwise hold thousands of pictures.

    Args:
        pieces: The JSON, cut where pictures begin and end: a picture is never copied into it.
    """

    __slots__ = ("pieces", "size")

    def __init__(self, *pieces: bytes) -> None:
        self.pieces: tuple[bytes, ...] | None = pieces
        """The JSON; None once released."""
        self.size = sum(map(len, pieces))

    @property
    def data(self) -> bytes | None:
        """The JSON in one piece; None once released."""
        return None if self.pieces is None else b"".join(self.pieces)

    def release(self) -> None:
        """Lets the bytes go."""
        self.pieces = None


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request and the JSON that is posted for it.

    Args:
        request: What the caller gave; a retry builds the body again from it.
        body: The JSON, images included.
        images: Number of pictures in the body.
        key: What its answer is stored under; None without a response store.
    """

    request: ChatRequest
    body: Body
    images: int = 0
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A request on its way to a body: all fields settled, `references` still to be loaded, in message order."""

    request: ChatRequest
    fields: dict[str, Any]
    messages: list[Message]
    references: list[Any]


class BodyBuilder:
    """Builds bodies for one config. Safe to use from several threads at once."""

    def __init__(self, config: ChatConfig) -> None:
        self._config = config
        self._encoder = process_encoder(config.images)
        self._defaults = place_fields(config.sampling.fields(), config.dialect)
        if config.model is not None:
            self._defaults = {"model": config.model, **self._defaults}

    def prepare(self, request: ChatRequest) -> PreparedRequest | FailedRequest:
        """The request with its body, or why it cannot be sent. Never raises for what a row can hold."""
        draft = self.draft(request)
        return draft if isinstance(draft, FailedRequest) else self.finish(draft)

    def draft(self, request: ChatRequest) -> Draft | FailedRequest:
        """Everything but the pictures: microseconds, no waiting."""
        try:
            if not isinstance(request.body, (dict, Mapping)):
                raise RequestError(f"body: expected an object, got {type(request.body).__name__}")
            fields = merge_fields(self._defaults, request.body, self._config.dialect)
            if not isinstance(request.custom_id, str):
                raise RequestError(f"custom_id: expected a string, got {request.custom_id!r:.80}")
            if not isinstance(model := fields.get("model"), str) or not model:
                raise RequestError(f"body.model: expected a name, got {model!r}; name it in the row or with --model")
            if "messages" not in fields:
                raise RequestError("body.messages: missing")
            messages = to_messages(fields["messages"], self._config.system_prompt)
            return Draft(request, fields, messages, image_references(messages))
        except RequestError as error:
            return failed_before_sending(request, error)

    def finish(self, draft: Draft) -> PreparedRequest | FailedRequest:
        """Loads and encodes the pictures and writes the JSON; may wait for a disk or a server."""
        try:
            if not draft.references:
                body = Body(dumps({**draft.fields, "messages": draft.messages}))
                return PreparedRequest(draft.request, body, 0, self._key(draft, draft.messages))
            urls = self._image_urls(draft)
            marks = [url if isinstance(url, str) else f"{_MARK}{i}." for i, url in enumerate(urls)]
            text = dumps({**draft.fields, "messages": replace_images(draft.messages, marks)})
            key = None
            if self._config.response_store is not None:
                hashes = [url if isinstance(url, str) else picture_hash(url.head, url.payload) for url in urls]
                key = self._key(draft, replace_images(draft.messages, hashes))
            return PreparedRequest(draft.request, Body(*_spliced(text, urls)), len(urls), key)
        except RequestError as error:
            return failed_before_sending(draft.request, error)
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            return failed_before_sending(draft.request, RequestError(f"body: cannot be written as JSON: {error}"))

    def loads_quickly(self, drafts: list[Draft]) -> bool:
        """Whether the pictures of drafts need not be waited for, as far as those before them tell."""
        return all(self._encoder.loads_quickly(reference) for draft in drafts for reference in draft.references)

    def _key(self, draft: Draft, messages: list[Message]) -> str | None:
        if self._config.response_store is None:
            return None
        fields = {**draft.fields, "messages": messages}
        return request_key(self._config.store_namespace, draft.request.custom_id, draft.request.path, fields)

    def _image_urls(self, draft: Draft) -> list[DataURL | str]:
        origin = draft.request.origin
        beside = origin.file if origin else None
        return [self._encoder.url(reference, beside) for reference in draft.references]


def _spliced(text: bytes, urls: list[DataURL | str]) -> Iterator[bytes]:
    """The JSON text with the pictures where their marks are, which stand in it in the order of the pictures."""
    at = 0
    for i, url in enumerate(urls):
        if not isinstance(url, str):
            mark = f"{_MARK}{i}.".encode()
            place = text.index(mark, at)
            yield text[at:place] + url.head
            yield url.payload
            at = place + len(mark)
    yield text[at:]


def failed_before_sending(request: ChatRequest, error: RequestError) -> FailedRequest:
    """The record of a request that no server has seen."""
    return FailedRequest(
        custom_id=request.custom_id,
        kind=error.kind,
        message=error.message,
        context=request.context,
        origin=request.origin,
    )
