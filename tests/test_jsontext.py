"""JSON on the way out is strict; on the way in it bends as far as servers and rows do."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_llm.jsontext import dumps, loads, object_in

texts = st.text(st.sampled_from('a"\\/é\n\u2028\ud835\ufffd\U0001f600'), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=12,
)


def as_strict(value: Any) -> Any:
    """What a reader of strict JSON gets to see."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [as_strict(item) for item in value]
    if isinstance(value, dict):
        return {key: as_strict(item) for key, item in value.items()}
    return value


@given(values)
def test_whatever_is_written_is_one_line_of_strict_json_with_the_same_content(value: Any) -> None:
    raw = dumps(value)
    assert b"\n" not in raw
    assert json.loads(raw.decode("utf-8"), parse_constant=pytest.fail) == as_strict(value)


@given(values)
def test_whatever_is_read_can_be_written_by_the_strictest_writer(value: Any) -> None:
    """C57, C58: one odd character or number in an answer never ends a run at the output."""
    lenient = json.dumps(value).encode()
    orjson.loads(orjson.dumps(loads(lenient), option=orjson.OPT_NON_STR_KEYS))


@pytest.mark.parametrize(
    ("value", "raw"),
    [
        ({"a": [1, "é", None, True]}, '{"a":[1,"é",null,true]}'.encode()),
        ({"logprob": -math.inf, "x": [math.nan]}, b'{"logprob":null,"x":[null]}'),
        ("abc\ud835def", b'"abc\\ud835def"'),
        ({"\ud835": math.inf}, b'{"\\ud835":null}'),
        ({"x": (1.5, math.nan), "y": "\ud835"}, b'{"x":[1.5,null],"y":"\\ud835"}'),
        (2**70, b"1180591620717411303424"),
        ({1: "a", None: "b"}, b'{"1":"a","null":"b"}'),
    ],
)
def test_what_strict_json_cannot_say_is_written_by_rule(value: Any, raw: bytes) -> None:
    """C57, C58: half a surrogate pair as its escape, NaN and infinities as null."""
    assert dumps(value) == raw


@pytest.mark.parametrize("value", [b"bytes", object(), {"x": {1, 2}}, {(1, 2): 3}])
def test_what_json_cannot_say_at_all_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError):
        dumps(value)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'{"a":[1,2.5,"x"]}', {"a": [1, 2.5, "x"]}),
        (b"\xef\xbb\xbf{}", {}),
        (b' {"a":1}\r\n', {"a": 1}),
        (b'{"content":"abc\\ud835def"}', {"content": "abc\ufffddef"}),
        (b'{"\\udc00":"\\ud835"}', {"\ufffd": "\ufffd"}),
        (b'["\\ud835\\udd04", "\\ud835"]', ["\U0001d504", "\ufffd"]),
        (b'{"logprob":-Infinity,"x":[NaN,Infinity]}', {"logprob": None, "x": [None, None]}),
        ('"\u2028\u2029\u0085"'.encode(), "\u2028\u2029\u0085"),
    ],
)
def test_what_servers_bend_is_read_by_rule(raw: bytes, value: Any) -> None:
    """C43, C44, C57, C58: a mark, separators, half a surrogate pair as U+FFFD, bare NaN and infinities as null."""
    assert loads(raw) == value


def test_a_number_beyond_every_float_is_null_too() -> None:
    assert loads(b"[1e400, -1e400]") == [None, None]


@pytest.mark.parametrize("raw", [b"", b" ", b"{", b"{}{}", b"{'a':1}", b"<html>", b"[1,]", b"nul", b"9" * 5000])
def test_what_is_no_json_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        loads(raw)


def test_bytes_that_are_not_utf8_are_named_by_their_place() -> None:
    """C45: a decoding error is a value error that tells where."""
    with pytest.raises(UnicodeDecodeError) as caught:
        loads(b'{"a":"\xe0\x41"}')
    assert caught.value.start == 6


@pytest.mark.parametrize("depth", [100, 300, 600, 900, 1500, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_nesting_is_either_refused_on_reading_or_written_again(depth: int, opening: bytes, closing: bytes) -> None:
    try:
        value = loads(opening * depth + b"1" + closing * depth)
    except ValueError as error:
        assert "deep" in str(error)  # noqa: PT017
        assert depth > 100
        return
    assert dumps({"response": {"body": value}})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ('```json\n{"a": {"b": [{}]}}\n```', {"a": {"b": [{}]}}),
        ('I {think} so: {"a": "}"}. Done.', {"a": "}"}),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}),
        ('first {"a": 1}, which is {"a": 1}', {"a": 1}),
        ('either {"a": 1} or {"a": 2}', None),
        ('[{"a": 1}, {"a": 2}]', None),
        ('{"a": 1', None),
        ('the form is {"a": number}, so {"a": 1}', {"a": 1}),
        ('{"whole": {"a": 1}, "cut', None),
        ('{"whole": {"a": 1}, "cut": tru', None),
        ('{"cut": "a string with {}', None),
        ("no object", None),
        ('{"a": ' * 3000, None),
        ('{"a": ' + "9" * 5000 + "}", None),
    ],
)
def test_the_one_object_of_a_text_is_found_whatever_stands_around_it(text: str, found: dict[str, Any] | None) -> None:
    assert object_in(text) == found


@pytest.mark.parametrize("number", [2**63, 2**70, -(2**80), 10**300])
def test_integers_of_any_length_stay_what_they_are(number: int) -> None:
    text = b'{"n": %d, "x": [0.1234567890123456789012, NaN]}' % number
    value = loads(text)
    assert value == {"n": number, "x": [0.1234567890123456789012, None]}
    assert loads(dumps(value)) == value
