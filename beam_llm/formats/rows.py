"""The `rows` format: any JSON object in, the same object with the answer's columns out."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from beam_llm.errors import ConfigError, RequestError
from beam_llm.formats.common_row import custom_id_of, parse_object, source_of, without_data_urls
from beam_llm.jsontext import dumps
from beam_llm.records import ChatRequest, Completion, Origin, Outcome

_MESSAGES, _PROMPT = "messages", "prompt"
_IMAGES = ("image", "images")


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Which columns of a row make its request.

    Args:
        prompt: Template in which `{column}` is replaced; `{{` and `}}` are braces. None: the row's `messages` column,
            else its `prompt` column.
        image_columns: Columns with a picture or a list of pictures, sent before the text in this order. None given:
            `image` and `images`, where a row has them.
        messages_column: Column with messages in any accepted form; excludes `prompt`.

    Raises:
        ConfigError: Both a prompt and a messages column, or a template that cannot be read.
    """

    prompt: str | None = None
    image_columns: tuple[str, ...] = ()
    messages_column: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is not None and self.messages_column is not None:
            raise ConfigError("prompt and messages_column exclude each other: messages already hold the prompt")
        if self.messages_column is not None and self.image_columns:
            raise ConfigError("messages_column and image_column exclude each other: put the images into the messages")
        if self.prompt is not None:
            self.template_columns()

    def template_columns(self) -> list[str]:
        """The columns that the prompt template names."""
        try:
            fields = list(string.Formatter().parse(self.prompt or ""))
        except ValueError as error:
            raise ConfigError(f"prompt: {error}; a brace that is meant as such is written twice") from error
        for _, name, spec, conversion in fields:
            if name == "" or spec or conversion:
                raise ConfigError("prompt: write columns as {name}, and a brace that is meant as such twice")
        return [name for _, name, _, _ in fields if name is not None]


def read_request(line: bytes, origin: Origin, columns: RowColumns) -> ChatRequest:
    """The request of a row; the row itself comes back as the outcome's context.

    A row may bring body fields of its own in an object column `body`; other columns are never sent.

    Raises:
        RequestError: Not JSON, not an object, or a column that is missing, null or of the wrong kind.
    """
    return request_of_row(parse_object(line), origin, columns)


def request_of_row(row: dict[str, Any], origin: Origin, columns: RowColumns) -> ChatRequest:
    """As `read_request`, for a row that is read already."""
    body = row.get("body", {})
    if not isinstance(body, dict):
        raise RequestError(f"body: expected an object of request fields, got {body!r:.80}")
    if isinstance(model := row.get("model"), str) and model:
        body = {"model": model, **body}
    if "messages" not in body:
        body = {**body, "messages": _messages(row, columns)}
    return ChatRequest(custom_id_of(row, origin), body, context=row, origin=origin)


def _messages(row: Mapping[str, Any], columns: RowColumns) -> Any:
    if columns.messages_column is not None:
        return _value(row, columns.messages_column)
    if columns.prompt is not None:
        pieces = string.Formatter().parse(columns.prompt)
        text = "".join(said + ("" if name is None else _as_text(_value(row, name))) for said, name, _, _ in pieces)
    elif row.get(_MESSAGES) is not None:
        return row[_MESSAGES]
    else:
        text = _value(row, _PROMPT)
        if not isinstance(text, str):
            raise RequestError(f"prompt: expected a string, got {text!r:.80}")
    pictures = _pictures(row, columns)
    return [*({"type": "image", "value": picture} for picture in pictures), {"type": "text", "text": text}]


def _pictures(row: Mapping[str, Any], columns: RowColumns) -> list[Any]:
    if columns.image_columns:
        values = [_value(row, name) for name in columns.image_columns]
    else:
        values = [row[name] for name in _IMAGES if row.get(name) is not None]
    return [picture for value in values for picture in (value if isinstance(value, list) else [value])]


def _value(row: Mapping[str, Any], name: str) -> Any:
    if (value := row.get(name)) is None:
        state = "is null" if name in row else "is missing"
        raise RequestError(f"column {name!r} {state}; the row has {', '.join(map(repr, row)) or 'no columns'}"[:500])
    return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value).decode()


def write_outcome(outcome: Outcome) -> bytes:
    """The row with `custom_id` and the answer's columns, or `error`; without line end.

    A column of the input that has the name of one of ours is kept as `input_<name>`.
    """
    row = without_data_urls(outcome.context) if isinstance(outcome.context, dict) else {"input": outcome.context}
    ours = {
        "custom_id": outcome.custom_id,
        **(_answer(outcome) if isinstance(outcome, Completion) else _error(outcome)),
    }
    kept = {
        _free_name(name, ours, row): value
        for name, value in row.items()
        if value is not None or isinstance(outcome.context, dict)
    }
    return dumps({**kept, **ours})


def _free_name(name: str, ours: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    if name not in ours or name == "custom_id":
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


def _error(outcome: Outcome) -> dict[str, Any]:
    assert not isinstance(outcome, Completion)
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
