"""The `rows` format, reading: which columns of a JSON object or of a table's row make its request."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from beam_llm.errors import ConfigError, RequestError
from beam_llm.formats.common_row import custom_id_of, parse_object, without_data_urls
from beam_llm.jsontext import dumps, loads
from beam_llm.messages import fill_images, has_empty_images
from beam_llm.parquet_rows import ParquetRow
from beam_llm.records import ChatRequest, Origin

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
        messages_column: Column with messages in any accepted form, JSON text too; excludes `prompt`. None: `messages`,
            where a row has it and there is no `prompt` template. Image parts that name no picture, as Hugging Face
            data sets have them, get those of the image columns in turn.

    Raises:
        ConfigError: Both a prompt and a messages column, or a template that cannot be read.
    """

    prompt: str | None = None
    image_columns: tuple[str, ...] = ()
    messages_column: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is not None and self.messages_column is not None:
            raise ConfigError("prompt and messages_column exclude each other: messages already hold the prompt")
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
    """The request of a line of JSON; the row itself comes back as the outcome's context.

    Raises:
        RequestError: Not JSON, not an object, or a column that is missing, null or of the wrong kind.
    """
    return request_of_row(parse_object(line), origin, columns)


def request_of_row(row: Mapping[str, Any], origin: Origin, columns: RowColumns) -> ChatRequest:
    """The request of a row of any file.

    A row may bring body fields of its own in an object column `body`; other columns are never sent.

    Raises:
        RequestError: A column that is missing, null or of the wrong kind.
    """
    body = _body(row)
    if isinstance(model := row.get("model"), str) and model:
        body = {"model": model, **body}
    if "messages" not in body:
        body = {**body, "messages": _messages(row, columns)}
    return ChatRequest(custom_id_of(row, origin), body, context=row, origin=origin)


def _body(row: Mapping[str, Any]) -> dict[str, Any]:
    body = _parsed(row.get("body"), "{")
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise RequestError(f"body: expected an object of request fields, got {body!r:.80}")
    return _without_nulls(body) if isinstance(row, ParquetRow) else body


def _messages(row: Mapping[str, Any], columns: RowColumns) -> Any:
    name = columns.messages_column or _MESSAGES
    if columns.prompt is None and (columns.messages_column is not None or row.get(name) is not None):
        messages = _parsed(_value(row, name), "[")
        if isinstance(row, ParquetRow):
            messages = _without_nulls(messages)
        return fill_images(messages, _pictures(row, columns) if has_empty_images(messages) else [])
    if columns.prompt is not None:
        pieces = string.Formatter().parse(columns.prompt)
        text = "".join(said + ("" if name is None else _as_text(_value(row, name))) for said, name, _, _ in pieces)
    else:
        text = _value(row, _PROMPT)
        if not isinstance(text, str):
            raise RequestError(f"prompt: expected a string, got {text!r:.80}")
    if pictures := _pictures(row, columns):
        said = [{"type": "text", "text": text}] if text else []
        return [*({"type": "image", "value": picture} for picture in pictures), *said]
    return text


def _pictures(row: Mapping[str, Any], columns: RowColumns) -> list[Any]:
    names = columns.image_columns or [name for name in _IMAGES if row.get(name) is not None]
    return [picture for name in names for picture in _column_pictures(row, name)]


def _column_pictures(row: Mapping[str, Any], name: str) -> list[Any]:
    if isinstance(row, ParquetRow) and name in row:
        found = row.pictures(name)
        return found if found is not None else [_value(row, name)]
    value = _value(row, name)
    return value if isinstance(value, list) else [value]


def _parsed(value: Any, opening: str) -> Any:
    """A value that a table keeps as JSON text, as itself; any other text as it is."""
    if isinstance(value, str) and value.lstrip().startswith(opening):
        with suppress(ValueError):
            parsed = loads(value.encode())
            if isinstance(parsed, dict) or all(isinstance(item, dict) for item in parsed):
                return parsed
    return value


def _without_nulls(value: Any) -> Any:
    """Every struct of a Parquet column has all its fields, those that nobody set as null."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _value(row: Mapping[str, Any], name: str) -> Any:
    if (value := row.get(name)) is None:
        state = "is null" if name in row else "is missing"
        raise RequestError(f"column {name!r} {state}; the row has {', '.join(map(repr, row)) or 'no columns'}"[:500])
    return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(without_data_urls(value)).decode().strip('"')


def missing_column(columns: RowColumns, rows: Iterable[Mapping[str, Any]]) -> str | None:
    """What to say of a column that the flags name and that none of some rows has; None if all is well.

    Args:
        columns: What the flags say.
        rows: The first rows of the input, or one that has all columns of a table. None at all: nothing to say.
    """
    found = list(dict.fromkeys(name for row in rows for name in row))
    if not found:
        return None
    has = f"the input has {', '.join(map(repr, found))}"[:300]
    wanted = [("prompt", name) for name in columns.template_columns()]
    wanted += [("image_column", name) for name in columns.image_columns]
    wanted += [("messages_column", columns.messages_column)] if columns.messages_column else []
    for flag, name in wanted:
        if name not in found:
            near = get_close_matches(name, found, n=1)
            return f"{flag}: no column {name!r}; " + (f"did you mean {near[0]!r}? " if near else "") + has
    if columns.prompt is None and columns.messages_column is None and not {_MESSAGES, _PROMPT, "body"} & set(found):
        return f"no column 'messages' or 'prompt' to ask: give --prompt or --messages_column; {has}"
    return None
