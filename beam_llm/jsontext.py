"""JSON as it comes and as we write it: strict on the way out, lenient where servers and rows bend the rules."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import orjson

from beam_llm.spill import Deferred

_ORJSON_DEPTH = 254
"""Levels that orjson writes; it reads 1,024."""

_DEEPEST = 200
"""Levels that are taken in: a result line puts a few around what was read."""

_LENIENT = json.JSONDecoder(strict=False)
"""Takes line ends in strings, which models write."""

_BOM = b"\xef\xbb\xbf"

_LONG_NUMBER = re.compile(rb"(?<![.\d])\d{19}")
"""Of integers beyond 64 bits orjson makes floats."""

_LONGEST_EXACT = 64 << 10
"""Longer texts, which hold pictures, are not searched for long numbers."""


def dumps(value: Any) -> bytes:
    """Strict JSON on one line: UTF-8, NaN and infinities as null, half surrogate pairs as `\\udXXX` escapes,
    integers of any length, values that were left on disk (`Deferred`) as themselves.

    Raises:
        TypeError: Something that JSON cannot say.
    """
    try:
        return orjson.dumps(value, default=_loaded)
    except TypeError:
        # orjson refuses half surrogate pairs and keys that are not strings; Python's json writes both.
        text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=_loaded)
        return text.encode()


def _loaded(value: Any) -> Any:
    if isinstance(value, Deferred):  # a large text that was left on disk
        return value.load()
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def loads(raw: bytes) -> Any:
    """The value of a JSON text.

    Takes what strict parsers refuse and servers send all the same: NaN and infinities (become null), half surrogate
    pairs as escapes (become U+FFFD), a byte order mark.

    Raises:
        ValueError: Not JSON, or not UTF-8.
    """
    try:
        value = _read_leniently(raw) if _has_long_number(raw) else orjson.loads(raw)
    except orjson.JSONDecodeError:
        value = _read_leniently(raw)
    if raw.count(b"[") + raw.count(b"{") >= _DEEPEST and _is_too_deep(value):
        raise ValueError(f"nested too deeply: {_DEEPEST} levels or more")
    return value


def _has_long_number(raw: bytes) -> bool:
    return len(raw) <= _LONGEST_EXACT and _LONG_NUMBER.search(raw) is not None


def _read_leniently(raw: bytes) -> Any:
    text = raw.removeprefix(_BOM).decode("utf-8")
    try:
        return _whole_characters(json.loads(text, parse_constant=lambda name: None, parse_float=_finite_float))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def object_in(text: str) -> dict[str, Any] | None:
    """The one JSON object of a text, whatever stands around it.

    Returns:
        The object; None if there is none, or several that differ. The inner object of one that is cut off is none.
    """
    found: list[dict[str, Any]] = []
    start = text.find("{")
    while start >= 0:
        try:
            value, end = _LENIENT.raw_decode(text, start)
            found.append(value)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated string"):
                break
            end = max(start + 1, error.pos)
        except (ValueError, RecursionError):  # a number of thousands of digits, thousands of levels
            return None
        start = text.find("{", end)
    return found[0] if found and all(value == found[0] for value in found) else None


def _is_too_deep(value: Any) -> bool:
    for _ in range(_ORJSON_DEPTH - _DEEPEST):
        value = [value]
    try:
        orjson.dumps(value)
    except TypeError as error:
        return "ecursion" in str(error)
    return False


def _finite_float(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(item) for key, item in value.items()}
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
