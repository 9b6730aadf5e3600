"""Which sampling fields are sent, where in the body, and which ones a dialect refuses."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from beam_llm.errors import ConfigError, RequestError
from beam_llm.sampling import REFUSED, Dialect, SamplingParams, check_dialect, merge_fields

GENERIC, OPENAI, VLLM, SGLANG = Dialect.GENERIC, Dialect.OPENAI, Dialect.VLLM, Dialect.SGLANG
BOTH_BUDGETS = {"max_completion_tokens": 9, "max_tokens": 7}
THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def test_nothing_is_sent_unless_it_is_set() -> None:
    assert SamplingParams().fields() == {}
    assert merge_fields({}, {"messages": "m"}, GENERIC) == {"messages": "m"}


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"temperature": 0, "max_tokens": 5}, {"temperature": 0, "max_tokens": 5}),
        ({"top_p": 1.0, "top_k": -1, "min_p": 0.0}, {"top_p": 1.0, "top_k": -1, "min_p": 0.0}),
        ({"presence_penalty": -2, "repetition_penalty": 1.1}, {"presence_penalty": -2, "repetition_penalty": 1.1}),
        ({"extra_body": {"seed": 7, "temperature": 2}, "temperature": 1}, {"seed": 7, "temperature": 2}),
        ({"enable_thinking": False}, THINKING_OFF),
        ({"enable_thinking": True, "extra_body": THINKING_OFF}, THINKING_OFF),
        (
            {"enable_thinking": False, "extra_body": {"chat_template_kwargs": {"a": 1}}},
            {"chat_template_kwargs": {"enable_thinking": False, "a": 1}},
        ),
    ],
)
def test_what_is_set_becomes_top_level_fields(given: dict[str, Any], fields: dict[str, Any]) -> None:
    before = copy.deepcopy(given)
    assert SamplingParams(**given).fields() == fields
    assert given == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("repetition_penalty", -1),
        ("max_tokens", 0),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_and_the_way_out(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must be .* got {value!r}; leave it unset"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", "0.5", "a number or None"),
        ("top_p", True, "a number or None"),
        ("max_tokens", 5.0, "a whole number or None"),
        ("enable_thinking", "no", "True or False or None"),
        ("extra_body", "{}", "a dict"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_its_name(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name} must be {expected}, got {value!r}")


@pytest.mark.parametrize(
    ("dialect", "field", "remedy"),
    [
        (OPENAI, "top_k", "unknown fields with 400"),
        (OPENAI, "chat_template_kwargs", "unknown fields with 400"),
        (OPENAI, "repetition_penalty", "choose the dialect of your server"),
        (VLLM, "guided_json", "structured_outputs"),
        (VLLM, "regex", "structured_outputs"),
        (VLLM, "separate_reasoning", "include_reasoning"),
        (SGLANG, "structured_outputs", "regex, ebnf or response_format"),
        (SGLANG, "guided_choice", "regex, ebnf or response_format"),
        (SGLANG, "include_reasoning", "separate_reasoning"),
    ],
)
def test_a_field_that_the_server_rejects_or_ignores_is_refused(dialect: Dialect, field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}=.* dialect {dialect}: .*{remedy}"):
        check_dialect({"model": "m", field: 1}, dialect)
    with pytest.raises(RequestError, match=rf"^body: {field}="):
        merge_fields({}, {field: 1}, dialect)


@pytest.mark.parametrize(
    ("dialect", "field"),
    [
        (OPENAI, "seed"),
        (OPENAI, "max_completion_tokens"),
        (OPENAI, "reasoning_effort"),
        (VLLM, "top_k"),
        (VLLM, "structured_outputs"),
        (SGLANG, "regex"),
        (SGLANG, "separate_reasoning"),
        (VLLM, "a_field_of_next_year"),
    ],
)
def test_a_field_that_the_server_may_read_is_sent(dialect: Dialect, field: str) -> None:
    assert merge_fields({}, {field: 1}, dialect) == {field: 1}


def test_generic_refuses_nothing() -> None:
    every = {field: 1 for refused in REFUSED.values() for field in refused}
    assert merge_fields({}, every, GENERIC) == every


@pytest.mark.parametrize(
    ("defaults", "body", "merged"),
    [
        ({"temperature": 0.5}, {"temperature": 1}, {"temperature": 1}),
        ({"temperature": 0.5}, {"temperature": None}, {"temperature": None}),
        ({"temperature": 0.5}, {"top_p": 1}, {"temperature": 0.5, "top_p": 1}),
        ({"max_tokens": 5}, {"max_completion_tokens": 9}, {"max_completion_tokens": 9}),
        ({"max_tokens": 5}, BOTH_BUDGETS, BOTH_BUDGETS),
        ({"seed": 1}, {"extra_body": {"seed": 2, "x": 3}}, {"seed": 2, "x": 3}),
        ({}, {"seed": 1, "extra_body": None}, {"seed": 1}),
        ({}, {"stream": False}, {"stream": False}),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "a": 1}},
            {"chat_template_kwargs": {"enable_thinking": False, "b": 2}},
            {"chat_template_kwargs": {"enable_thinking": False, "a": 1, "b": 2}},
        ),
        ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": None}, {"chat_template_kwargs": None}),
    ],
)
def test_a_row_wins_over_the_defaults(defaults: dict[str, Any], body: dict[str, Any], merged: dict[str, Any]) -> None:
    before = copy.deepcopy((defaults, body))
    assert merge_fields(defaults, body, GENERIC) == merged
    assert (defaults, body) == before


@pytest.mark.parametrize(
    ("dialect", "body", "merged"),
    [
        (GENERIC, {"enable_thinking": False}, {"enable_thinking": False}),
        (VLLM, {"enable_thinking": False}, THINKING_OFF),
        (SGLANG, {"enable_thinking": False}, THINKING_OFF),
        (VLLM, {"extra_body": {"enable_thinking": False}}, THINKING_OFF),
        (VLLM, {"enable_thinking": True, **THINKING_OFF}, THINKING_OFF),
        (VLLM, {"enable_thinking": False, "chat_template_kwargs": None}, THINKING_OFF),
    ],
)
def test_enable_thinking_goes_where_the_server_reads_it(
    dialect: Dialect, body: dict[str, Any], merged: dict[str, Any]
) -> None:
    assert merge_fields({}, body, dialect) == merged


@pytest.mark.parametrize(
    ("defaults", "body"),
    [({}, {"stream": True}), ({}, {"extra_body": {"stream": True}})],
)
def test_a_stream_is_refused_wherever_it_is_asked_for(defaults: dict[str, Any], body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"stream"):
        merge_fields(defaults, body, GENERIC)


@pytest.mark.parametrize("dialect", list(Dialect))
def test_a_dialect_reads_as_its_name(dialect: Dialect) -> None:
    assert Dialect(str(dialect)) is dialect
    assert f"{dialect}" == dialect.value
