"""From a request to the bytes that are posted, or to the record that says why there are none."""

from __future__ import annotations

import base64
import copy
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from beam_llm.body import Body, BodyBuilder, Draft, PreparedRequest, failed_before_sending
from beam_llm.config import ChatConfig
from beam_llm.errors import ErrorKind, RequestError
from beam_llm.records import ChatRequest, FailedRequest, Origin
from beam_llm.sampling import Dialect, SamplingParams

ORIGIN = Origin("rows.jsonl", 17)
HELLO = [{"role": "user", "content": "hello"}]
NESTED: list[Any] = []
for _ in range(5000):
    NESTED = [NESTED]

words = st.sampled_from(
    ["role", "user", "content", "type", "text", "image", "value", "url", "", "\ud800", "\u2028", "é"]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


def builder(model: str | None = "m", **settings: Any) -> BodyBuilder:
    return BodyBuilder(ChatConfig(base_urls=("http://localhost:1/v1",), model=model, **settings))


def request(**body: Any) -> ChatRequest:
    return ChatRequest("row-1", body, context={"kept": 1}, origin=ORIGIN)


def prepared(build: BodyBuilder, **body: Any) -> PreparedRequest:
    outcome = build.prepare(request(**body))
    assert isinstance(outcome, PreparedRequest), outcome
    return outcome


def posted(build: BodyBuilder, **body: Any) -> Any:
    data = prepared(build, **body).body.data
    assert data is not None
    return orjson.loads(data)


def failure(build: BodyBuilder, **body: Any) -> FailedRequest:
    outcome = build.prepare(request(**body))
    assert isinstance(outcome, FailedRequest), outcome
    return outcome


def png(colour: str = "red") -> bytes:
    file = BytesIO()
    Image.new("RGB", (3, 2), colour).save(file, "PNG")
    return file.getvalue()


def data_url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def test_body_lets_its_bytes_go_for_every_holder_and_keeps_its_size() -> None:
    body = Body(b"{}")
    other_holder = PreparedRequest(request(), body)
    assert body.data == b"{}"
    body.release()
    body.release()
    assert (other_holder.body.data, other_holder.body.size) == (None, 2)


def test_body_is_exactly_what_the_row_says_when_nothing_is_set() -> None:
    row = {"model": "own", "messages": HELLO, "seed": 7, "vendor_field": {"x": [None, 1.5]}}
    assert posted(builder(model=None), **row) == row


def test_defaults_fill_in_what_the_row_leaves_open() -> None:
    build = builder(sampling=SamplingParams(temperature=0.5, max_tokens=9), system_prompt="be brief")
    assert posted(build, messages="hello", temperature=1) == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, *HELLO],
        "temperature": 1,
        "max_tokens": 9,
    }


def test_model_of_the_row_wins() -> None:
    assert posted(builder(model="default"), messages=HELLO, model="own")["model"] == "own"


def test_rows_do_not_see_each_others_fields() -> None:
    build = builder(sampling=SamplingParams(temperature=0.5))
    first = request(messages=[{"role": "user", "content": ["a"]}], seed=1)
    before = copy.deepcopy(first)
    build.prepare(first)
    assert first == before
    assert posted(build, messages=HELLO) == {"model": "m", "messages": HELLO, "temperature": 0.5}


@pytest.mark.parametrize(
    ("model", "body", "reason"),
    [
        (None, {"messages": HELLO}, "body.model: expected a name, got None; name it in the row or with --model"),
        ("m", {"messages": HELLO, "model": 7}, "body.model: expected a name, got 7"),
        ("m", {"messages": HELLO, "model": ""}, "body.model: expected a name, got ''"),
        ("m", {}, "body.messages: missing"),
        ("m", {"messages": None}, "messages: expected a string or a list, got null"),
        ("m", {"messages": HELLO, "stream": True}, "body: stream=true"),
        ("m", {"messages": HELLO, "x": object()}, "body: cannot be written as JSON: "),
        ("m", {"messages": HELLO, "x": b"bytes"}, "body: cannot be written as JSON: "),
        ("m", {"messages": HELLO, "x": NESTED}, "body: cannot be written as JSON: "),
    ],
)
def test_a_row_that_makes_no_body_is_a_failure_that_says_why(
    model: str | None, body: dict[str, Any], reason: str
) -> None:
    outcome = failure(builder(model=model), **body)
    assert outcome.message.startswith(reason)
    assert (outcome.kind, outcome.attempts, outcome.status_code) == (ErrorKind.BAD_INPUT, 0, None)
    assert (outcome.custom_id, outcome.context, outcome.origin) == ("row-1", {"kept": 1}, ORIGIN)


def test_field_of_another_dialect_fails_the_row_not_the_run() -> None:
    build = builder(dialect=Dialect.OPENAI)
    assert "top_k" in failure(build, messages=HELLO, top_k=1).message
    assert posted(build, messages=HELLO)["model"] == "m"


@given(st.dictionaries(st.sampled_from(["messages", "model", "extra_body", "stream", "x"]), json_values))
def test_no_row_that_json_can_hold_raises(body: dict[str, Any]) -> None:
    outcome = builder().prepare(ChatRequest("row-1", body))
    if isinstance(outcome, PreparedRequest):
        assert json.loads(outcome.body.data or b"")["messages"]
    else:
        assert outcome.message


def test_pictures_become_data_urls_in_their_places(tmp_path: Path) -> None:
    """C79."""
    red, blue = tmp_path / "red.png", tmp_path / "blue.jpg"  # a wrong suffix: the bytes decide
    red.write_bytes(png("red"))
    blue.write_bytes(png("blue"))
    parts = [{"type": "image", "value": str(red)}, "between", {"type": "image", "value": str(blue), "detail": "low"}]
    outcome = prepared(builder(), messages=parts)
    assert outcome.images == 2
    assert orjson.loads(outcome.body.data or b"")["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": data_url(png("red"))}},
        {"type": "text", "text": "between"},
        {"type": "image_url", "image_url": {"url": data_url(png("blue")), "detail": "low"}},
    ]


def test_address_of_a_picture_is_left_to_the_server() -> None:
    content = posted(builder(), messages=[{"type": "image", "value": "https://example.com/a%2Fb.png?s=x%2By"}])
    assert content["messages"][0]["content"][0]["image_url"] == {"url": "https://example.com/a%2Fb.png?s=x%2By"}


@pytest.mark.parametrize("content", [None, b"", b"no picture", png()[:40]])
def test_picture_that_cannot_be_read_fails_its_row(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.png"
    if content is not None:
        path.write_bytes(content)
    outcome = failure(builder(), messages=["look", {"type": "image", "value": str(path)}])
    assert outcome.kind is ErrorKind.BAD_IMAGE
    assert outcome.message
    assert (outcome.custom_id, outcome.attempts, outcome.origin) == ("row-1", 0, ORIGIN)


def test_body_can_be_built_again_from_the_request_after_its_bytes_are_gone(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    build = builder()
    first = prepared(build, messages=[{"type": "image", "value": str(tmp_path / "a.png")}])
    sent = first.body.data
    first.body.release()
    again = build.prepare(first.request)
    assert isinstance(again, PreparedRequest)
    assert again.body.data == sent


def test_a_draft_lists_the_pictures_without_reading_them() -> None:
    draft = builder().draft(request(messages=[{"type": "image", "value": "/nowhere/a.png"}, b"\x89PNG"]))
    assert isinstance(draft, Draft)
    assert draft.references == ["/nowhere/a.png", b"\x89PNG"]


def test_failure_before_sending_keeps_everything_of_the_request() -> None:
    outcome = failed_before_sending(request(), RequestError("why", ErrorKind.BAD_IMAGE))
    assert outcome == FailedRequest("row-1", ErrorKind.BAD_IMAGE, "why", context={"kept": 1}, origin=ORIGIN)
