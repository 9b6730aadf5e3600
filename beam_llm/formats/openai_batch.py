"""The OpenAI Batch format: input lines to requests, outcomes to result lines."""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b
from typing import Any

from beam_llm.answers import answer_flaw
from beam_llm.errors import RequestError
from beam_llm.formats.common_row import custom_id_of, source_of, without_data_urls
from beam_llm.jsontext import dumps, loads
from beam_llm.records import CHAT_COMPLETIONS, ChatRequest, Completion, FailedRequest, Origin, Outcome


def request_of_line(row: dict[str, Any], origin: Origin) -> ChatRequest:
    """The request of an input line: `{"custom_id", "method", "url", "body"}`.

    Args:
        row: The line, parsed.
        origin: Where it stands; its text is the custom_id of a line that has none.

    Raises:
        RequestError: A field of the wrong kind; names the field and the value.
    """
    body = row.get("body")
    if not isinstance(body, dict):
        raise RequestError(f"body: expected an object, got {body!r:.80}")
    method = row.get("method", "POST")
    if method != "POST":
        raise RequestError(f"method: expected 'POST', got {method!r:.80}")
    path = row.get("url", CHAT_COMPLETIONS)
    if path != CHAT_COMPLETIONS:
        raise RequestError(f"url: expected {CHAT_COMPLETIONS!r}, got {path!r:.80}")
    return ChatRequest(custom_id_of(row, origin), body, path, origin=origin)


def write_outcome(outcome: Outcome) -> bytes:
    """The result line of an outcome, without line end: an OpenAI Batch result with `beam_llm` added."""
    error, given = None, {}
    if isinstance(outcome, Completion):
        kind = str(answer_flaw(outcome.body) or "completed")
    else:
        kind, error = outcome.kind.value, {"code": outcome.kind, "message": outcome.message}
        if outcome.context is not None:
            given = {"input": without_data_urls(outcome.context)}
    return dumps(
        {
            "id": _result_id(outcome),
            "custom_id": outcome.custom_id,
            "response": _response(outcome),
            "error": error,
            "beam_llm": {
                "kind": kind,
                "attempts": outcome.attempts,
                "latency_ms": round(outcome.latency_ms, 1),
                "endpoint": outcome.endpoint,
                "source": source_of(outcome),
                "file": outcome.origin.file if outcome.origin else None,
                "offset": outcome.origin.offset if outcome.origin else None,
                **given,
            },
        }
    )


def _result_id(outcome: Outcome) -> str:
    """Unique for a row and the same in every run, as the ids of the service are unique."""
    return f"beam_llm-{blake2b(f'{outcome.custom_id} {outcome.origin}'.encode(), digest_size=8).hexdigest()}"


def _response(outcome: Outcome) -> dict[str, Any] | None:
    if outcome.status_code is None:
        return None
    body: Any = outcome.body
    if isinstance(outcome, FailedRequest) and outcome.answer is not None:
        body = outcome.answer
    elif isinstance(body, str):
        with suppress(ValueError):  # HTML, or cut off: kept as text
            body = loads(body.encode())
    return {"status_code": outcome.status_code, "request_id": outcome.request_id, "body": body}
