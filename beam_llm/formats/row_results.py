"""The `rows` format, writing: the row as it came, with the answer's columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from beam_llm.formats.common_row import source_of, without_data_urls
from beam_llm.jsontext import dumps
from beam_llm.records import Completion, FailedRequest, Outcome


def write_outcome(outcome: Outcome) -> bytes:
    """The row with `custom_id` and the answer's columns, or `error`; without line end.

    A column of the input that has the name of one of ours is kept as `input_<name>`.
    """
    ours = answer_columns(outcome)
    if isinstance(outcome.context, Mapping):
        row = without_data_urls(outcome.context)
        return dumps({**{free_name(name, row): value for name, value in row.items()}, **ours})
    given = {} if outcome.context is None else {"input": without_data_urls(outcome.context)}
    return dumps({**given, **ours})


def answer_columns(outcome: Outcome) -> dict[str, Any]:
    """Our columns of a row: `custom_id` and those of the answer, or `error`."""
    columns = _answer(outcome) if isinstance(outcome, Completion) else _error(outcome)
    return {"custom_id": outcome.custom_id, **columns}


COLUMNS = (
    *("custom_id", "answer", "reasoning", "finish_reason", "usage"),
    *("refusal", "tool_calls", "logprobs", "choices", "error"),
)
"""All columns of ours that a row may get, of answers and of failures."""


def free_name(name: str, row: Iterable[str]) -> str:
    """What a column of the input is called beside ours, in all rows alike: its own name, or `input_<name>`."""
    if name not in COLUMNS or name == "custom_id":
        return name
    name = f"input_{name}"
    while name in row:
        name = f"input_{name}"
    return name


def _answer(completion: Completion) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "answer": completion.answer,
        "reasoning": completion.reasoning,
        "finish_reason": completion.finish_reason,
        "usage": completion.usage,
    }
    if completion.refusal is not None:
        columns["refusal"] = completion.refusal
    if tool_calls := completion.message.get("tool_calls"):
        columns["tool_calls"] = tool_calls
    if logprobs := completion.choice.get("logprobs"):
        columns["logprobs"] = logprobs
    if len(choices := completion.body.get("choices") or []) > 1:
        columns["choices"] = choices
    return columns


def _error(outcome: FailedRequest) -> dict[str, Any]:
    origin = outcome.origin
    return {
        "error": {
            "kind": outcome.kind,
            "message": outcome.message,
            "status_code": outcome.status_code,
            "body": outcome.answer or outcome.body,
            "attempts": outcome.attempts,
            "source": source_of(outcome),
            "file": origin.file if origin else None,
            "offset": origin.offset if origin else None,
        }
    }
