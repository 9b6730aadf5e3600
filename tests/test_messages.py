"""From every form of prompt to OpenAI messages, and image references out of them and back in."""

from __future__ import annotations

import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from PIL import Image

from beam_llm.errors import ErrorKind, RequestError
from beam_llm.messages import count_images, image_references, replace_images, to_messages

PICTURE = Image.new("RGB", (2, 2))
FILE = Path("a.png")
SOUND = {"type": "input_audio", "input_audio": {"data": "…", "format": "wav"}}
STRUCT = {"bytes": b"\x89PNG", "path": None}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(url: Any, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **options}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "t1", "type": "function"}]}

FORMS: list[tuple[Any, list[dict[str, Any]]]] = [
    ("hello", [user("hello")]),
    ("", [user("")]),
    (["a", "b"], [user([text("a"), text("b")])]),
    (("a",), [user([text("a")])]),
    ({"type": "text", "value": "a"}, [user([text("a")])]),
    ([{"type": "text", "value": "a"}, {"type": "image", "value": "x.png"}], [user([text("a"), image("x.png")])]),
    ([{"type": "image", "value": "x.png"}, {"type": "text", "value": "a"}], [user([image("x.png"), text("a")])]),
    ([{"type": "text", "text": "a", "value": "b"}], [user([text("a")])]),
    ([text("a") | {"cache_control": {"type": "e"}}], [user([text("a") | {"cache_control": {"type": "e"}}])]),
    (MappingProxyType({"type": "text", "text": "a"}), [user([text("a")])]),
    ([{"type": "image", "image": "x.png"}], [user([image("x.png")])]),
    ([{"type": "image", "url": "x.png"}], [user([image("x.png")])]),
    ([{"type": "image_url", "image_url": "x.png"}], [user([image("x.png")])]),
    ([{"type": "image_url", "image_url": {"url": "x.png", "detail": "low"}}], [user([image("x.png", detail="low")])]),
    ([{"type": "image", "value": "x.png", "detail": "high"}], [user([image("x.png", detail="high")])]),
    ([{"type": "image", "value": STRUCT}], [user([image(STRUCT)])]),
    ([{"type": "image", "value": PICTURE}], [user([image(PICTURE)])]),
    (["look", PICTURE, b"\x89PNG", FILE], [user([text("look"), image(PICTURE), image(b"\x89PNG"), image(FILE)])]),
    (PICTURE, [user([image(PICTURE)])]),
    (b"\x89PNG", [user([image(b"\x89PNG")])]),
    (FILE, [user([image(FILE)])]),
    ([SOUND], [user([SOUND])]),
    (user("a"), [user("a")]),
    ([user("a"), TOOL_CALL], [user("a"), TOOL_CALL]),
    ([user([])], [user([])]),
    ([user("a") | {"name": "n"}], [{"role": "user", "name": "n", "content": "a"}]),
    ([user({"type": "image", "value": "x.png"})], [user([image("x.png")])]),
    ([user(PICTURE)], [user([image(PICTURE)])]),
    ([user(["a", {"type": "image", "value": "x"}])], [user([text("a"), image("x")])]),
    ([{"role": "tool", "tool_call_id": "t1"}], [{"role": "tool", "tool_call_id": "t1"}]),
]


@pytest.mark.parametrize(("prompt", "messages"), FORMS)
def test_every_form_becomes_openai_messages_with_parts_in_order(prompt: Any, messages: list[dict[str, Any]]) -> None:
    assert to_messages(prompt) == messages


@pytest.mark.parametrize("prompt", [messages for _, messages in FORMS])
def test_openai_messages_come_out_as_they_went_in(prompt: list[dict[str, Any]]) -> None:
    assert to_messages(prompt) == prompt


def test_given_messages_are_never_changed() -> None:
    prompt = [user(["a", {"type": "image", "value": "x", "detail": "low"}])]
    before = copy.deepcopy(prompt)
    messages = to_messages(prompt, "be brief")
    replace_images(messages, ["data:…"])
    messages[1]["content"].append(text("more"))
    assert prompt == before


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        (None, "messages: expected a string or a list, got null"),
        (7, "messages: expected a string or a list, got int '7'"),
        ([], "messages: the list is empty"),
        ([None], "messages[0]: expected a part"),
        (["a", 7], "messages[1]: expected a part"),
        ([["a"]], "messages[0]: expected a part"),
        ({}, "messages[0].type: expected"),
        ([{"type": None, "text": "a"}], "messages[0].type: expected"),
        ([{"type": "text"}], "messages[0]: a text part needs a string"),
        ([{"type": "text", "value": 7}], "messages[0]: a text part needs a string"),
        ([{"type": "image"}], "messages[0]: an image part names no image"),
        ([{"type": "image", "value": ""}], "messages[0]: an image part names no image"),
        ([{"type": "image_url", "image_url": {"url": None}}], "messages[0]: an image part names no image"),
        ([user("a"), "b"], "messages[1]: expected an object with a role"),
        ([user("a"), text("b")], "messages[1].role: expected a string"),
        ([{"role": "", "content": "a"}], "messages[0].role: expected a string"),
        ([{"role": 7, "content": "a"}], "messages[0].role: expected a string"),
        ([user(7)], "messages[0].content: expected a string or a list of parts"),
        ([user("a"), user(["b", {"type": "image"}])], "messages[1].content[1]: an image part names no image"),
    ],
)
def test_a_form_that_is_not_understood_is_refused_at_its_place(prompt: Any, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_messages(prompt)
    assert caught.value.message.startswith(place)
    assert caught.value.kind is ErrorKind.BAD_INPUT


def test_a_huge_value_of_the_wrong_kind_is_named_shortly() -> None:
    with pytest.raises(RequestError) as caught:
        to_messages([{"type": "text", "text": ["x" * 100_000]}])
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("prompt", "roles"),
    [
        ("hello", ["system", "user"]),
        ([text("a")], ["system", "user"]),
        ([user("a"), {"role": "assistant", "content": "b"}], ["system", "user", "assistant"]),
        ([{"role": "system", "content": "own"}, user("a")], ["system", "user"]),
        ([{"role": "developer", "content": "own"}, user("a")], ["developer", "user"]),
    ],
)
def test_system_prompt_goes_in_front_unless_there_is_one(prompt: Any, roles: list[str]) -> None:
    messages = to_messages(prompt, "default")
    assert [message["role"] for message in messages] == roles
    assert messages[0]["content"] == ("own" if isinstance(prompt, list) and "own" in str(prompt) else "default")


CONVERSATION = [
    {"role": "system", "content": "s"},
    user([image("1.png"), text("between"), image("2.png", detail="low")]),
    TOOL_CALL,
    user([image("3.png")]),
]


def test_references_are_listed_in_the_order_in_which_they_are_sent() -> None:
    assert image_references(CONVERSATION) == ["1.png", "2.png", "3.png"]


def test_replaced_images_keep_their_place_and_their_options() -> None:
    assert replace_images(CONVERSATION, ["A", "B", "C"]) == [
        {"role": "system", "content": "s"},
        user([image("A"), text("between"), image("B", detail="low")]),
        TOOL_CALL,
        user([image("C")]),
    ]
    assert image_references(CONVERSATION) == ["1.png", "2.png", "3.png"]


def test_image_options_of_other_vendors_stay_on_the_part() -> None:
    part = {**image("x.png"), "cache_control": {"type": "ephemeral"}, "uuid": "u1"}
    assert to_messages([user([part])]) == [user([part])]


@pytest.mark.parametrize("prompt", [prompt for prompt, _ in FORMS] + [CONVERSATION])
def test_count_agrees_with_the_messages(prompt: Any) -> None:
    assert count_images(prompt) == len(image_references(to_messages(prompt)))


@pytest.mark.parametrize("prompt", [None, 7, [], [None, 7], {}, [{"role": "user"}], [user(7)]])
def test_count_takes_what_cannot_be_sent_for_no_picture(prompt: Any) -> None:
    assert count_images(prompt) == 0
