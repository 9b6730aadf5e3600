"""One request's way through its tries, and the outcome at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from beam_llm.answers import FAILABLE
from beam_llm.body import Body, PreparedRequest
from beam_llm.config import ChatConfig
from beam_llm.endpoints import Endpoint
from beam_llm.errors import ErrorKind, Verdict, clip
from beam_llm.records import Completion, FailedRequest, Outcome

Weigh = Callable[[int], None]
"""Told how many bytes of a request's body are held and not yet written."""


ANSWERED = (ErrorKind.NULL_CONTENT, *FAILABLE)
"""Failures in which there is an answer to keep."""


@dataclass(slots=True)
class Attempt:
    """What one try brought."""

    verdict: Verdict
    answer: dict[str, Any] | None = None
    status_code: int | None = None
    request_id: str | None = None
    retry_after_s: float | None = None
    latency_ms: float = 0.0

    @property
    def kind(self) -> ErrorKind:
        """Why it failed."""
        return self.verdict.kind or ErrorKind.INVALID_RESPONSE

    def total_tokens(self) -> int | None:
        """What the server counted; None if it did not say."""
        usage = (self.answer or {}).get("usage")
        total = usage.get("total_tokens") if isinstance(usage, dict) else None
        return total if isinstance(total, int) else None


@dataclass(slots=True)
class Course:
    """One request's way through its tries.

    Args:
        prepared: The request with its first body.
        body: The body at hand; its bytes may be gone.
        weigh: Told the bytes of it that are still to be written.
        holds_slot: Whether it counts as open.
        ends_s: When its deadline is over, by the clock; None before the first try, or without a deadline.
        tokens: What a try is expected to use up of a limit on tokens.
        attempts: Tries so far.
        retried: Why each try but the last failed.
        endpoint: Of the last try.
    """

    prepared: PreparedRequest
    body: Body
    weigh: Weigh
    holds_slot: bool = True
    ends_s: float | None = None
    tokens: float = 0.0
    attempts: int = 0
    retried: list[ErrorKind] = field(default_factory=list)
    endpoint: Endpoint | None = None

    @property
    def base_url(self) -> str:
        """Where the last try was sent to; empty before the first one."""
        return self.endpoint.base_url if self.endpoint is not None else ""

    def outcome(self, attempt: Attempt) -> Outcome:
        """The record of a request that ends with this try."""
        if attempt.verdict.kind is not None or attempt.answer is None:
            return self.failure(attempt)
        request = self.prepared.request
        return Completion(
            custom_id=request.custom_id,
            body=attempt.answer,
            status_code=attempt.status_code or 200,
            request_id=attempt.request_id,
            attempts=self.attempts,
            latency_ms=attempt.latency_ms,
            endpoint=self.base_url,
            context=request.context,
            origin=request.origin,
            retried=tuple(self.retried),
            request_bytes=self.body.size,
        )

    def failure(self, attempt: Attempt) -> FailedRequest:
        """What the record would be if the request ended with this failed try."""
        request, verdict = self.prepared.request, attempt.verdict
        return FailedRequest(
            custom_id=request.custom_id,
            kind=attempt.kind,
            message=verdict.message,
            status_code=attempt.status_code,
            body=verdict.excerpt,
            request_id=attempt.request_id,
            attempts=self.attempts,
            latency_ms=attempt.latency_ms,
            endpoint=self.base_url,
            context=request.context,
            origin=request.origin,
            retried=tuple(self.retried),
            request_bytes=self.body.size,
            answer=attempt.answer if verdict.kind in ANSWERED else None,
        )


def with_what_was_sent(verdict: Verdict, url: str, size: int, no_key: str | None) -> Verdict:
    """Puts before the server's words what they are about: the URL of a 404, a body's bytes, a key that is not there.

    Args:
        verdict: What is made of the answer.
        url: Where the request went.
        size: Bytes of its body.
        no_key: Why no key was sent; None if one was.
    """
    about = {
        ErrorKind.NOT_FOUND: url,
        ErrorKind.TOO_LARGE: f"a body of {size:,} bytes",
        ErrorKind.AUTHENTICATION: no_key,
        ErrorKind.PERMISSION: no_key,
    }
    sent = None if verdict.kind is None else about.get(verdict.kind)
    return verdict if sent is None else replace(verdict, message=clip(f"{sent}: {verdict.message}"))


def why_no_key(config: ChatConfig) -> str:
    """Why there is no key to send, and where one would go."""
    if config.api_key_secret or not config.api_key_env:
        return "no key was sent"
    return f"no key was sent, as ${config.api_key_env} is not set (--api_key_env names another variable)"
