"""From what people write (a string, typed parts, OpenAI messages, PIL objects) to OpenAI messages.

Images stay references here: `image_references` lists them and `replace_images` puts data URLs in their place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from PIL import Image

from beam_llm.errors import RequestError

Message = dict[str, Any]
Part = dict[str, Any]

_IN_MEMORY = (bytes, bytearray, memoryview, Image.Image, os.PathLike)
"""What can only be a picture when it stands where a part is expected."""


_MAPPING = (dict, Mapping)
"""A dict is told at once; asking an abstract class takes ten times as long."""


_IMAGE_TOKEN = "<image>"  # noqa: S105 - no password
_REFERENCE_FIELDS = ("image_url", "value", "image", "url")
_IMAGE_FIELDS = (*_REFERENCE_FIELDS, "type", "detail")


def to_messages(prompt: Any, system_prompt: str | None = None) -> list[Message]:
    """OpenAI messages of any accepted form, parts in their order, images still as references.

    Args:
        prompt: A string; a part or a list of parts (`{"type": "text"|"image", "value": …}`, OpenAI parts, strings, PIL
            objects, bytes); a message or a list of messages.
        system_prompt: Put in front unless the messages begin with a system or developer message; None adds nothing.

    Raises:
        RequestError: Nothing to ask, or a form that is not understood; names the place.
    """
    if isinstance(prompt, _MAPPING) or _is_in_memory(prompt):
        prompt = [prompt]
    messages: list[Message]
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, (list, Sequence)):
        raise RequestError(f"messages: expected a string or a list, got {_name(prompt)}")
    elif not prompt:
        raise RequestError("messages: the list is empty")
    elif any(isinstance(item, _MAPPING) and "role" in item for item in prompt):
        messages = [_message(item, f"messages[{i}]") for i, item in enumerate(prompt)]
    else:
        messages = [{"role": "user", "content": [_part(item, f"messages[{i}]") for i, item in enumerate(prompt)]}]
    if system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _is_in_memory(item: Any) -> bool:
    return type(item) not in (dict, str, list) and isinstance(item, _IN_MEMORY)


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, _MAPPING):
        raise RequestError(f"{where}: expected an object with a role, got {_name(item)}")
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role: expected a string such as 'user', got {role!r}")
    content = item.get("content")
    if content is None or isinstance(content, str):
        # None is right for an assistant's tool call; what else it may mean is for the server to judge.
        return dict(item)
    if isinstance(content, _MAPPING) or _is_in_memory(content):
        content = [content]
    if not isinstance(content, (list, Sequence)):
        raise RequestError(f"{where}.content: expected a string or a list of parts, got {_name(content)}")
    return {**item, "content": [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]}


def _part(item: Any, where: str) -> Part:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    if _is_in_memory(item):
        return _image_part(item)
    if not isinstance(item, _MAPPING):
        raise RequestError(f"{where}: expected a part such as {{'type': 'text', 'text': …}}, got {_name(item)}")
    kind = item.get("type")
    if kind == "text":
        text = item.get("text", item.get("value"))
        if not isinstance(text, str):
            raise RequestError(f"{where}: a text part needs a string in 'text' (or 'value'), got {_name(text)}")
        return {**{k: v for k, v in item.items() if k != "value"}, "text": text}
    if kind in ("image", "image_url"):
        return _typed_image_part(item, where)
    if not isinstance(kind, str):
        raise RequestError(f"{where}.type: expected 'text', 'image' or another OpenAI part type, got {kind!r}")
    return dict(item)  # input_audio, video_url, file …: the server's business


def _typed_image_part(item: Mapping[str, Any], where: str) -> Part:
    reference = next((item[name] for name in _REFERENCE_FIELDS if item.get(name) is not None), None)
    options: dict[str, Any] = {}
    if isinstance(reference, _MAPPING) and "url" in reference:
        options = {name: value for name, value in reference.items() if name != "url"}
        reference = reference["url"]
    if isinstance(detail := item.get("detail"), str):
        options["detail"] = detail
    if reference is None or (isinstance(reference, str) and not reference):
        raise RequestError(f"{where}: an image part names no image (expected a path, a URL, bytes or a PIL image)")
    kept = {name: value for name, value in item.items() if name not in _IMAGE_FIELDS}
    return {**kept, **_image_part(reference, options)}


def _image_part(reference: Any, options: Mapping[str, Any] | None = None) -> Part:
    return {"type": "image_url", "image_url": {"url": reference, **(options or {})}}


def _image_parts(messages: Sequence[Message]) -> Iterator[Part]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if part.get("type") == "image_url")


def image_references(messages: Sequence[Message]) -> list[Any]:
    """Every image reference, in the order in which the pictures are sent."""
    return [part["image_url"]["url"] for part in _image_parts(messages)]


def count_images(prompt: Any) -> int:
    """About how many pictures a prompt of any accepted form has, without building messages: for sizing batches."""
    if _is_in_memory(prompt):
        return 1
    if isinstance(prompt, _MAPPING):
        if prompt.get("type") in ("image", "image_url"):
            return 1
        return count_images(prompt.get("content"))
    if isinstance(prompt, str) or not isinstance(prompt, (list, Sequence)):
        return 0
    return sum(count_images(item) for item in prompt)


def place_images(messages: Any, pictures: Sequence[Any], *, must: bool) -> Any:
    """The messages with a row's pictures in them: where image parts name no picture, as in vision data sets of Hugging
    Face; where the text says `<image>`, as in those of LLaVA; else before the first text of the user.

    Args:
        messages: A prompt of any accepted form.
        pictures: The row's, in order.
        must: Whether the pictures were asked for; else they stay out of messages that have pictures of their own.

    Raises:
        RequestError: Not as many places as pictures.
    """
    parts = list(_given_parts(messages))
    empty = sum(map(_is_empty_image, parts))
    tokens = sum(_text_of(part).count(_IMAGE_TOKEN) for part in parts) if pictures else 0
    if empty:
        if empty != len(pictures):
            have = f"the image columns have {len(pictures)}"
            raise RequestError(f"messages: {empty} image parts name no picture, and {have}")
        return _filled(messages, iter(pictures), _EMPTY_PARTS)
    if not pictures or (not must and count_images(messages)):
        return messages
    if tokens and tokens != len(pictures):
        raise RequestError(
            f"messages: {tokens} times {_IMAGE_TOKEN}, and the image columns have {len(pictures)} pictures"
        )
    return _filled(messages, iter(pictures), _TOKENS) if tokens else _put_before(messages, pictures)


_EMPTY_PARTS, _TOKENS = "parts", "tokens"


def _filled(value: Any, following: Iterator[Any], places: str) -> Any:
    """A prompt, message, part or text with the following pictures in its places of one kind."""
    if isinstance(value, list):
        return [part for item in value for part in _spread(_filled(item, following, places))]
    if isinstance(value, _MAPPING) and "content" in value:
        return {**value, "content": _filled(value["content"], following, places)}
    if places == _EMPTY_PARTS:
        return {"type": "image", "value": next(following)} if _is_empty_image(value) else value
    text = _text_of(value)
    if _IMAGE_TOKEN not in text:
        return value
    first, *others = text.split(_IMAGE_TOKEN)
    said: list[Any] = [first.strip("\n")]
    for piece in others:
        said += [{"type": "image", "value": next(following)}, piece.strip("\n")]
    return [piece if isinstance(piece, dict) else {"type": "text", "text": piece} for piece in said if piece]


def _spread(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _put_before(messages: Any, pictures: Sequence[Any]) -> Any:
    parts = [{"type": "image", "value": picture} for picture in pictures]
    if isinstance(messages, str):
        return [*parts, {"type": "text", "text": messages}] if messages else parts
    items = _spread(messages)
    user = next((i for i, item in enumerate(items) if isinstance(item, _MAPPING) and item.get("role") == "user"), None)
    if user is None:
        return [*parts, *items]
    return [
        *items[:user],
        {**items[user], "content": _put_before(items[user].get("content"), pictures)},
        *items[user + 1 :],
    ]


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text", part.get("value")) if isinstance(part, _MAPPING) and part.get("type") == "text" else None
    return text if isinstance(text, str) else ""


def _given_parts(messages: Any) -> Iterator[Any]:
    """Parts and texts of a prompt of any accepted form."""
    for item in _spread(messages):
        if isinstance(item, _MAPPING) and "content" in item:
            yield from _given_parts(item["content"])
        else:
            yield item


def _is_empty_image(part: Any) -> bool:
    is_image = isinstance(part, _MAPPING) and part.get("type") in ("image", "image_url")
    return is_image and all(part.get(name) is None for name in _REFERENCE_FIELDS)


def replace_images(messages: Sequence[Message], urls: Sequence[str]) -> list[Message]:
    """The messages with the n-th image reference replaced by `urls[n]`; the given ones are not changed."""
    following = iter(urls)

    def replaced(part: Part) -> Part:
        if part.get("type") != "image_url":
            return part
        return {**part, "image_url": {**part["image_url"], "url": next(following)}}

    return [
        {**message, "content": [replaced(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _name(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
