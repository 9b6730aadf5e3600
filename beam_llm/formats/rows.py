"""The `rows` format, reading: which columns of a JSON object or of a table's row make its request."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from beam_llm.errors import ConfigError, RequestError
from beam_llm.formats.common_row import custom_id_of, without_data_urls
from beam_llm.jsontext import dumps, loads
from beam_llm.messages import place_images
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
        image_columns: Columns with a picture or a list of pictures, in this order. None given: `image` and `images`,
            where a row has them.
        messages_column: Column with messages in any accepted form, JSON text too; excludes `prompt`. None: `messages`,
            where a row has it and there is no `prompt` template. See `place_images` for where pictures go.

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


def request_of_row(row: Mapping[str, Any], origin: Origin, columns: RowColumns) -> ChatRequest:
    """The request of a row of any file; the row itself comes back as the outcome's context.

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
    body = _parsed(row.get("body"), "{", "body")
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise RequestError(f"body: expected an object of request fields, got {body!r:.80}")
    return _without_nulls(body) if isinstance(row, ParquetRow) else body


def _messages(row: Mapping[str, Any], columns: RowColumns) -> Any:
    if columns.prompt is not None:
        pieces = string.Formatter().parse(columns.prompt)
        text = "".join(said + ("" if name is None else _as_text(row, name)) for said, name, _, _ in pieces)
    elif columns.messages_column is not None or row.get(_MESSAGES) is not None or _PROMPT not in row:
        name = columns.messages_column or (_MESSAGES if _MESSAGES in row else _PROMPT)
        messages = _parsed(_value(row, name), "[", name)
        if isinstance(row, ParquetRow):
            messages = _without_nulls(messages)
        return place_images(messages, _pictures(row, columns), must=bool(columns.image_columns))
    else:
        text = _value(row, _PROMPT)
        if not isinstance(text, str):
            raise RequestError(f"prompt: expected a string, got {text!r:.80}")
    return place_images(text, _pictures(row, columns), must=True)


def _pictures(row: Mapping[str, Any], columns: RowColumns) -> list[Any]:
    names = columns.image_columns or [name for name in _IMAGES if row.get(name) is not None]
    return [picture for name in names for picture in _column_pictures(row, name)]


def _column_pictures(row: Mapping[str, Any], name: str) -> list[Any]:
    if isinstance(row, ParquetRow) and name in row:
        found = row.pictures(name)
        pictures = found if found is not None else [_value(row, name)]
    else:
        value = _parsed(_value(row, name), "[", name)
        pictures = value if isinstance(value, list) else [value]
    return [picture.strip() if isinstance(picture, str) else picture for picture in pictures]


_LIST = re.compile(r"\s*\[\s*[\"'{]")


def _parsed(value: Any, opening: str, column: str) -> Any:
    """A value that a table keeps as JSON text, as itself; any other text as it is.

    Raises:
        RequestError: It begins like a list and is no JSON, as Python's own form of a list is none.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(opening):
        return value
    try:
        return loads(value.encode())
    except ValueError as error:
        if opening == "[" and _LIST.match(value):
            reason = f"column {column!r}: looks like a list and is no JSON ({error}); write such cells with json.dumps"
            raise RequestError(reason) from error
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


def _as_text(row: Mapping[str, Any], name: str) -> str:
    value = _value(row, name)
    if _holds_bytes(value):
        raise RequestError(f"column {name!r} holds bytes, which a prompt cannot; pictures go into --image_column")
    return value if isinstance(value, str) else dumps(without_data_urls(value)).decode().strip('"')


def _holds_bytes(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return any(_holds_bytes(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, (bytes, bytearray))


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
