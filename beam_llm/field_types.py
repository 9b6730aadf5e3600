"""Holds the fields of a dataclass to their annotations, which Python itself never looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from beam_llm.errors import ConfigError, redact

_MAX_SHOWN_CHARS = 100

_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("True or False", "True or False"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    type(None): ("None", "None"),
    Mapping: ("a dict", "dicts"),
}


def check_field_types(config: Any) -> None:
    """Makes tuples of lists where tuples are meant, and refuses every other value of another type than annotated.

    An int will do for a float; a bool is no number.

    Args:
        config: An instance of a dataclass, frozen or not, that is being made.

    Raises:
        ConfigError: Names the field, the value, what it should be and the default.
    """
    hints = get_type_hints(type(config))
    for field in fields(config):
        value, expected = getattr(config, field.name), hints[field.name]
        if isinstance(value, list) and not _fits(value, expected) and _fits(tuple(value), expected):
            object.__setattr__(config, field.name, tuple(value))
        elif not _fits(value, expected):
            shown = redact(repr(value))[:_MAX_SHOWN_CHARS]
            raise ConfigError(
                f"{field.name} must be {_describe(expected)}, got {shown}{_way_out(field, value, expected)}"
            )


def _options(expected: Any) -> tuple[Any, ...]:
    return get_args(expected) if get_origin(expected) in (Union, UnionType) else (expected,)


def _fits(value: Any, expected: Any) -> bool:
    return any(_fits_one(value, option) for option in _options(expected))


def _fits_one(value: Any, expected: Any) -> bool:
    origin = get_origin(expected)
    if origin is tuple:
        return isinstance(value, tuple) and _items_fit(value, get_args(expected))
    if isinstance(value, bool):
        return expected is bool
    if expected is float:
        return isinstance(value, (int, float))
    return isinstance(value, origin or expected)


def _items_fit(items: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    if expected[-1] is ...:
        return all(_fits(item, expected[0]) for item in items)
    return len(items) == len(expected) and all(map(_fits, items, expected))


def _describe(expected: Any) -> str:
    return " or ".join(_describe_one(option) for option in _options(expected))


def _describe_one(expected: Any) -> str:
    origin = get_origin(expected)
    if origin is tuple:
        item, *others = get_args(expected)
        number = "" if others == [...] else f"{len(others) + 1} "
        return f"a tuple of {number}{_WORDS[item][1]}"
    words = _WORDS.get(origin or expected)
    return words[0] if words else f"of type {expected.__name__}"


def _way_out(field: Field[Any], value: Any, expected: Any) -> str:
    if isinstance(value, str) and _fits((value,), expected):
        return f": write ({value!r},)"
    if field.default is MISSING:
        return ""
    return f"; leave it out for the default, {field.default!r}"
