"""Sampling parameters and dialects: which fields are sent, and where in the body each server reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from beam_llm.errors import ConfigError, RequestError
from beam_llm.field_types import check_field_types


class Dialect(str, Enum):
    """Whose body fields are meant. `GENERIC` refuses nothing and sends what it is given."""

    GENERIC = "generic"
    OPENAI = "openai"
    VLLM = "vllm"
    SGLANG = "sglang"

    def __str__(self) -> str:
        return self.value


_NOT_OPENAI = "OpenAI answers unknown fields with 400"
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_OPEN_SERVERS_ONLY = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "enable_thinking",
    "chat_template_kwargs",
    "chat_template",
    "length_penalty",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "structured_outputs",
    "bad_words",
    "regex",
    "ebnf",
    "truncate_prompt_tokens",
    "mm_processor_kwargs",
    "separate_reasoning",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)

REFUSED: dict[Dialect, dict[str, str]] = {
    # What a server would reject (OpenAI) or ignore without a word (vLLM, SGLang): wire-level facts of openai-openapi
    # 2026-08, vLLM's chat_completion/protocol.py and SGLang's protocol.py.
    Dialect.GENERIC: {},
    Dialect.OPENAI: dict.fromkeys(
        _OPEN_SERVERS_ONLY, f"{_NOT_OPENAI}; leave it out, or choose the dialect of your server"
    ),
    Dialect.VLLM: {
        **dict.fromkeys(_GUIDED, "vLLM ignores it since 0.12; use structured_outputs or response_format"),
        **dict.fromkeys(("regex", "ebnf"), "vLLM ignores it; use structured_outputs or response_format"),
        "separate_reasoning": "vLLM ignores it; use include_reasoning",
    },
    Dialect.SGLANG: {
        **dict.fromkeys(_GUIDED, "SGLang ignores it; use regex, ebnf or response_format"),
        "structured_outputs": "SGLang ignores it; use regex, ebnf or response_format",
        "include_reasoning": "SGLang ignores it; use separate_reasoning",
    },
}

_READ_AS_TEMPLATE_VARIABLE = (Dialect.VLLM, Dialect.SGLANG)
"""Servers that ignore a top-level `enable_thinking` and read it from `chat_template_kwargs`."""

_TEMPLATE = "chat_template_kwargs"

_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "top_k": (-1, math.inf),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0.01, math.inf),
    "max_tokens": (1, math.inf),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Defaults under what a request says. None means: not sent, so the server's own default holds.

    Args:
        temperature: 0 and up.
        top_p: 0 to 1.
        top_k: Candidates kept; -1 or 0 turn it off on vLLM and SGLang.
        min_p: 0 to 1.
        presence_penalty: -2 to 2.
        repetition_penalty: 0.01 and up; 1 is neutral.
        max_tokens: Tokens of the answer. Not added to a request that says `max_completion_tokens`.
        enable_thinking: Sent as `chat_template_kwargs.enable_thinking`.
        extra_body: Any other body fields, put at the top level of the JSON.

    Raises:
        ConfigError: A value is of the wrong type or outside its range.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    enable_thinking: bool | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_field_types(self)
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                above = f"finite, and {low:g} or more," if math.isinf(high) else f"between {low:g} and {high:g}"
                raise ConfigError(f"{name} must be {above}, got {value!r}; leave it unset to use the server's default")

    def fields(self) -> dict[str, Any]:
        """The set parameters as top-level body fields; empty when nothing is set."""
        fields = {name: value for name in _BOUNDS if (value := getattr(self, name)) is not None}
        fields.update(self.extra_body)
        if self.enable_thinking is not None:
            template = {"enable_thinking": self.enable_thinking, **(fields.get("chat_template_kwargs") or {})}
            fields["chat_template_kwargs"] = template
        return fields


def check_dialect(fields: Mapping[str, Any], dialect: Dialect) -> None:
    """Refuse fields that the dialect's server would reject or ignore.

    Raises:
        ConfigError: Names the field, the value and what to use instead.
    """
    if fields.get("stream"):
        raise ConfigError("stream=true: answers are read whole; leave `stream` out")
    refused = REFUSED[dialect]
    for name in fields:
        if name in refused:
            raise ConfigError(f"{name}={fields[name]!r} does not go with dialect {dialect}: {refused[name]}")


def place_fields(fields: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """The fields where the dialect's server reads them: `extra_body` and, as a template variable, `enable_thinking`.

    Args:
        fields: Body fields as people write them; never changed.
        dialect: The server's dialect.

    Returns:
        A new dict. `extra_body`'s fields are at the top level, as an SDK would put them.
    """
    placed = dict(fields)
    if isinstance(extra := placed.pop("extra_body", None), Mapping):
        placed.update(extra)
    if dialect in _READ_AS_TEMPLATE_VARIABLE and (thinking := placed.pop("enable_thinking", None)) is not None:
        placed[_TEMPLATE] = {"enable_thinking": thinking, **(placed.get(_TEMPLATE) or {})}
    return placed


def merge_fields(defaults: Mapping[str, Any], body: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """A request's own fields over the defaults.

    Args:
        defaults: `place_fields(SamplingParams.fields())`, plus the model.
        body: The request's body; never changed. A null there counts as sent by the user and stays.
        dialect: The server's dialect.

    Returns:
        A new dict.

    Raises:
        RequestError: A field does not go with the dialect, or asks for a stream.
    """
    own = place_fields(body, dialect)
    try:
        check_dialect(own, dialect)
    except ConfigError as error:
        raise RequestError(f"body: {error}") from error
    merged = {**defaults, **own}
    for said, other in (("max_completion_tokens", "max_tokens"), ("max_tokens", "max_completion_tokens")):
        if said in own and other not in own:
            merged.pop(other, None)  # two names of one limit: both at once are refused
    default, mine = defaults.get(_TEMPLATE), own.get(_TEMPLATE)
    if isinstance(default, Mapping) and isinstance(mine, Mapping):
        merged[_TEMPLATE] = {**default, **mine}
    elif isinstance(default, Mapping) and "enable_thinking" in own:
        merged[_TEMPLATE] = {name: value for name, value in default.items() if name != "enable_thinking"}
    return merged
