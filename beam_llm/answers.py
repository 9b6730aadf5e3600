"""What kind of answer a response body holds, and which kinds count as failures."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from beam_llm.errors import ErrorKind, Verdict

FAILABLE = (ErrorKind.TRUNCATED, ErrorKind.REFUSED, ErrorKind.FILTERED)
"""Answers that are kept as completions, marked, unless the user wants them as failures."""

_CUT_SHORT = ("length", "model_length", "max_tokens")  # OpenAI's word, Mistral's, and some gateways'

_WORDS = {
    ErrorKind.TRUNCATED: "the answer was cut off by the token limit",
    ErrorKind.REFUSED: "the model refused",
    ErrorKind.FILTERED: "the answer was filtered",
    ErrorKind.NULL_CONTENT: "the answer has no content, and nothing in it says why",
}


def answer_flaw(body: dict[str, Any]) -> ErrorKind | None:
    """What is wrong with a completion, by its first choice.

    Returns:
        `TRUNCATED` (token budget used up, be it by reasoning), `FILTERED`, `REFUSED`, `NULL_CONTENT` (content is null,
        without a tool call, a refusal or audio); None for an answer: an empty text is one, since a model may have
        nothing to say. A body without choices, as for embeddings, is an answer.
    """
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    choice = choices[0]
    message = choice.get("message")
    message = message if isinstance(message, dict) else {"content": choice.get("text")}
    if choice.get("finish_reason") == "content_filter":
        return ErrorKind.FILTERED
    if choice.get("finish_reason") in _CUT_SHORT:
        return ErrorKind.TRUNCATED
    if any(message.get(name) for name in ("tool_calls", "function_call", "audio")):
        return None
    if message.get("refusal"):
        return ErrorKind.REFUSED
    return ErrorKind.NULL_CONTENT if message.get("content") is None else None


def judge_answer(body: dict[str, Any], fail_on: Collection[str] = ()) -> Verdict | None:
    """Whether an answer counts as a failure.

    Args:
        body: A response that `classify_response` took for an answer.
        fail_on: Which of `FAILABLE` do. They are not sent again: the same budget, model and filter would give the same.

    Returns:
        The verdict of a failure; None for a completion. Null content is one always, and tried again.
    """
    flaw = answer_flaw(body)
    if flaw is ErrorKind.NULL_CONTENT:
        return Verdict(flaw, retryable=True, message=_WORDS[flaw])
    if flaw is None or flaw not in fail_on:
        return None
    choice = body["choices"][0]
    refusal = (choice.get("message") or {}).get("refusal") if flaw is ErrorKind.REFUSED else None
    return Verdict(flaw, retryable=False, message=f"{_WORDS[flaw]}: {refusal}"[:500] if refusal else _WORDS[flaw])
