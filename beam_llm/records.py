"""What goes in and what comes out: ChatRequest, Completion and FailedRequest, frozen and picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from beam_llm.errors import ErrorKind

CHAT_COMPLETIONS = "/v1/chat/completions"
"""Default path of a request, as the `url` of an OpenAI Batch line names it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of the `count` byte ranges of the whole input, in its order, from 0."""

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row stands.

    Args:
        file: Path.
        offset: Of its first byte; in uncompressed bytes for `.gz`.
        shard: The range that it was read in; None if it was not read by ranges.
    """

    file: str
    offset: int
    shard: Shard | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.offset}"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One question to a model, images still as references.

    Args:
        custom_id: The caller's id; comes back on the outcome. Should be unique in a run.
        body: Fields of the JSON body. `messages` may have any form that `beam_llm.messages` reads: OpenAI
            messages, a list of `{"type", "value"}` parts, or a plain string. What is set here wins over the
            defaults in `ChatConfig`.
        path: URL path of the endpoint, as in the `url` field of a batch line.
        context: Anything the caller wants back on the outcome. It is never sent.
        origin: The row it was read from; None for requests made in a pipeline.
    """

    custom_id: str
    body: Mapping[str, Any]
    path: str = CHAT_COMPLETIONS
    context: Any = None
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A server's answer, whole.

    Args:
        custom_id: The request's id.
        body: The response body as the server sent it: all choices, usage, logprobs, vendor fields.
        status_code: HTTP status, 200 as a rule.
        request_id: The server's `x-request-id` header; None if it sent none.
        attempts: Tries it took, 1 = the first one; 0 when the answer came from the response store.
        latency_ms: Time of the try that answered, from sending to the last byte; 0 from the store.
        endpoint: Base URL that answered.
        source: `server` or `store`.
        context, origin: As on the request.
        retried: Why each earlier try failed, in order.
        request_bytes: Size of the body that was posted.
        not_stored: It should have been put into the response store, which failed.
    """

    custom_id: str
    body: dict[str, Any]
    status_code: int = 200
    request_id: str | None = None
    attempts: int = 1
    latency_ms: float = 0.0
    endpoint: str = ""
    source: str = "server"
    context: Any = None
    origin: Origin | None = None
    retried: tuple[ErrorKind, ...] = ()
    request_bytes: int = 0
    not_stored: bool = False

    @property
    def choice(self) -> dict[str, Any]:
        """The first choice; empty if there is none."""
        choices = self.body.get("choices")
        return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}

    @property
    def message(self) -> dict[str, Any]:
        """The first choice's message; empty if there is none."""
        message = self.choice.get("message")
        return message if isinstance(message, dict) else {}

    @property
    def answer(self) -> str | None:
        """Text of the first choice; None for a pure tool call, a refusal, or a budget used up by reasoning."""
        content = self.message.get("content")
        if isinstance(content, list):  # parts, as some gateways answer
            texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
            return "".join(texts) if texts else None
        return content if isinstance(content, str) else None

    @property
    def reasoning(self) -> str | None:
        """Reasoning text under either name (vLLM >= 0.16 `reasoning`, others `reasoning_content`)."""
        for name in ("reasoning", "reasoning_content"):
            if isinstance(text := self.message.get(name), str) and text:
                return text
        return None

    @property
    def refusal(self) -> str | None:
        """The model's refusal, told apart from an empty answer."""
        text = self.message.get("refusal")
        return text if isinstance(text, str) and text else None

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended: stop, length, tool_calls, content_filter, …"""
        reason = self.choice.get("finish_reason")
        return reason if isinstance(reason, str) else None

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts as the server sent them; empty if it sent none."""
        usage = self.body.get("usage")
        return usage if isinstance(usage, dict) else {}


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that got no answer, and why.

    Args:
        custom_id: The request's id.
        kind: Why, in one word.
        message: The reason in a sentence, the server's own where there is one. Never empty.
        status_code: HTTP status; None if no response came.
        body: The server's own words, cut to 2 KB; None if it sent nothing.
        answer: The whole response body, where there was an answer that counts as a failure (null content, or what
            `ChatConfig.fail_on` names); else None.
        request_id: The server's `x-request-id` header.
        attempts: Requests sent for it; 0 if it failed before sending.
        latency_ms: Time of the last try.
        endpoint: Base URL of the last try; empty if nothing was sent.
        context, origin: As on the request.
        retried: Why each earlier try failed, in order; the last failure is `kind`.
        request_bytes: Size of the body that was posted.
    """

    custom_id: str
    kind: ErrorKind
    message: str
    status_code: int | None = None
    body: str | None = None
    request_id: str | None = None
    attempts: int = 0
    latency_ms: float = 0.0
    endpoint: str = ""
    context: Any = None
    origin: Origin | None = None
    retried: tuple[ErrorKind, ...] = field(default=())
    request_bytes: int = 0
    answer: dict[str, Any] | None = None


Outcome = Completion | FailedRequest
