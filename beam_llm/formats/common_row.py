"""What the JSON formats share: a line to an object, its id, where an outcome came from, data URLs kept out of files."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal
from typing import Any

from beam_llm.errors import RequestError
from beam_llm.jsontext import loads
from beam_llm.parquet_rows import ParquetRow
from beam_llm.records import Completion, Origin, Outcome
from beam_llm.spill import Deferred, Spilled

_LONGEST_KEPT = 200
"""Characters of a data URL that may stand in an output; longer ones are pictures."""


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        RequestError: Not UTF-8, not JSON, or not an object; says where and what.
    """
    try:
        row = loads(line)
    except UnicodeDecodeError as error:
        raise RequestError(f"the line is not UTF-8: byte {line[error.start]:#04x} at position {error.start}") from error
    except ValueError as error:
        raise RequestError(f"the line is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RequestError(f"the line is not a JSON object but {type(row).__name__}: {str(row)[:80]}")
    return row


def custom_id_of(row: Mapping[str, Any], origin: Origin) -> str:
    """The row's own `custom_id`, numbers as text (3.0, as pandas makes of 3, as `3`); else `<file>:<offset>`, which is
    the same in every run."""
    custom_id = row.get("custom_id")
    if isinstance(custom_id, str) and custom_id:
        return custom_id
    if isinstance(custom_id, float) and custom_id.is_integer():
        custom_id = int(custom_id)
    is_number = isinstance(custom_id, (int, float)) and not isinstance(custom_id, bool) and custom_id == custom_id
    return str(custom_id) if is_number else str(origin)


def source_of(outcome: Outcome) -> str:
    """`server`, `store`, or `client` for a request that was never sent."""
    if isinstance(outcome, Completion):
        return outcome.source
    return "server" if outcome.attempts else "client"


def without_data_urls(value: Any) -> Any:
    """The value for a JSON file: pictures (long data URLs, bytes) are cut off, and what JSON cannot say is text."""
    if isinstance(value, str):
        if len(value) > _LONGEST_KEPT and value.startswith("data:"):
            return _cut_off(value, len(value))
        return value
    if isinstance(value, Spilled):
        return _cut_off(value.head or "", value.length)
    if isinstance(value, (bytes, bytearray)):
        return f"… ({len(value)} bytes)"
    if isinstance(value, ParquetRow):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {key: without_data_urls(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_data_urls(item) for item in value]
    return str(value) if isinstance(value, (Decimal, timedelta, Deferred)) else value


def _cut_off(head: str, length: int) -> str:
    return f"{head[: head.find(',', 0, 100) + 1]}… ({length} characters)"


def as_text(line: bytes) -> str:
    """A line that could not be read, safe for a JSON file: at most 2 KB, bad bytes as `\\xNN`."""
    return line[:2048].decode("utf-8", "backslashreplace")
