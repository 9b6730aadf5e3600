"""What the simulator accepts: a chat request is read and checked as strictly as the strictest real server does."""

from __future__ import annotations

import base64
import io
import re
from typing import Any, NamedTuple

import orjson
from PIL import Image

from beam_llm.simulator.script import Script

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

IMAGE_FORMATS = {"image/jpeg": "JPEG", "image/png": "PNG", "image/webp": "WEBP", "image/gif": "GIF"}
"""Media types that OpenAI's vision guide lists, and Pillow's name for each."""

IMAGE_TOKENS = 85
"""Prompt tokens counted for a picture: what OpenAI charges at low detail."""

OPENAI_FIELDS = """
    audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages
    metadata modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
    prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream
    stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
"""
VLLM_FIELDS = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
    chat_template_kwargs continue_final_message documents echo ignore_eos include_reasoning
    include_stop_str_in_output kv_transfer_params length_penalty media_io_kwargs min_p min_tokens
    mm_processor_kwargs priority prompt_logprobs repetition_penalty request_id return_token_ids
    return_tokens_as_token_ids session_id skip_special_tokens spaces_between_special_tokens stop_token_ids
    structured_outputs thinking_token_budget top_k truncate_prompt_tokens use_beam_search vllm_xargs
"""
KNOWN_FIELDS = frozenset(f"{OPENAI_FIELDS} {VLLM_FIELDS}".split())
"""Top-level fields of OpenAI's chat completions, and those that vLLM adds."""

NUMBERS: dict[str, tuple[type, float, float]] = {
    # name: (int or float, least, greatest), from OpenAI's specification and vLLM's SamplingParams
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "presence_penalty": (float, -2, 2),
    "frequency_penalty": (float, -2, 2),
    "repetition_penalty": (float, 0, 2),
    "min_p": (float, 0, 1),
    "top_k": (int, -1, 1_000_000),
    "n": (int, 1, 128),
    "max_tokens": (int, 1, 10_000_000),
    "max_completion_tokens": (int, 1, 10_000_000),
    "top_logprobs": (int, 0, 20),
    "seed": (int, -(2**63), 2**63 - 1),
}
ABOVE_ZERO = frozenset({"top_p", "repetition_penalty"})
"""Zero itself is refused: by vLLM for both."""

OTHER_TYPES: dict[str, tuple[type, str]] = {
    "stream": (bool, "a boolean"),
    "logprobs": (bool, "a boolean"),
    "response_format": (dict, "an object"),
    "chat_template_kwargs": (dict, "an object"),
    "tools": (list, "an array"),
    "reasoning_effort": (str, "a string"),
}

_checked_images: dict[int, str] = {}
"""Hash of a good data URL -> its words. Load tests send few pictures many times, at 5 ms for each 600 KB JPEG."""

_DATA_URL = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,")


class Refusal(Exception):  # noqa: N818 - it is an answer, not an error of the simulator
    """A request that is answered with an error object.

    Args:
        status: HTTP status.
        message: What is wrong, for a person.
        param: The field that is wrong; None if no single one is.
        code: Machine-readable reason; None if the status says all.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


class Prompt(NamedTuple):
    """A request that was found good.

    Args:
        body: The whole JSON body.
        text: Text of the last user message (of the last message if there is none), text parts joined by a line feed.
        images: A word for every picture of that message, such as `[image JPEG 640x480]`, in order.
        tokens: Prompt tokens of all messages: words, and `IMAGE_TOKENS` a picture.
    """

    body: dict[str, Any]
    text: str
    images: tuple[str, ...]
    tokens: int


def read_prompt(raw: bytes, script: Script) -> Prompt:
    """Parses and checks a request body.

    Raises:
        Refusal: 400 for a bad body, 404 for a model that is not served.
    """
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        raise Refusal(400, f"We could not parse the JSON body of your request: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(400, "The body must be a JSON object")
    _check_fields(body, script.strict_fields)
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise Refusal(400, "you must provide a model parameter: a non-empty string", "model")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, "'messages' must be a non-empty array", "messages")
    if script.models and model not in script.models:
        raise Refusal(404, f"The model `{model}` does not exist", "model", "model_not_found")
    return _read_messages(body, messages)


def _read_messages(body: dict[str, Any], messages: list[Any]) -> Prompt:
    last_role, last_text, tokens = "", "", 0
    last_images: tuple[str, ...] = ()
    for index, message in enumerate(messages):
        role, text, images = _read_message(message, f"messages[{index}]")
        tokens += len(text.split()) + IMAGE_TOKENS * len(images)
        if role == "user" or last_role != "user":
            last_role, last_text, last_images = role, text, images
    return Prompt(body, last_text, last_images, tokens)


def _read_message(message: Any, where: str) -> tuple[str, str, tuple[str, ...]]:
    """Role, text and picture words of one message."""
    if not isinstance(message, dict):
        raise Refusal(400, f"{where} must be an object", where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise Refusal(400, f"{where}.role is {role!r}; it must be one of {', '.join(sorted(ROLES))}", f"{where}.role")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise Refusal(400, f"{where} has the role 'tool' but no tool_call_id", f"{where}.tool_call_id")
    if isinstance(content, str):
        return role, content, ()
    if content is None and role == "assistant" and (message.get("tool_calls") or message.get("function_call")):
        return role, "", ()
    where += ".content"
    if not isinstance(content, list) or not content:
        raise Refusal(400, f"{where} must be a string or a non-empty array of parts", where)
    texts, images = [], []
    for index, part in enumerate(content):
        spot = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise Refusal(400, f"{spot}.text must be a string", spot)
            texts.append(part["text"])
        elif kind == "image_url":
            if role != "user":
                raise Refusal(400, f"{spot}: image URLs are only allowed for messages with role 'user'", spot)
            images.append(_read_image_part(part, spot))
        else:
            raise Refusal(400, f"{spot}.type must be 'text' or 'image_url', got {kind!r}", spot)
    return role, "\n".join(texts), tuple(images)


def _read_image_part(part: dict[str, Any], where: str) -> str:
    where += ".image_url"
    image_url = part.get("image_url")
    if not isinstance(image_url, dict):
        raise Refusal(400, f"{where} must be an object with a 'url', not {type(image_url).__name__}", where)
    url, detail = image_url.get("url"), image_url.get("detail")
    if not isinstance(url, str):
        raise Refusal(400, f"{where}.url must be a string", where)
    if detail is not None and detail not in ("auto", "low", "high"):
        raise Refusal(400, f"{where}.detail must be auto, low or high, got {detail!r}", where)
    if url.startswith(("https://", "http://")) and len(url) > len("https://"):
        return f"[image {url}]"
    known = _checked_images.get(hash(url))
    if known is not None:
        return known
    header = _DATA_URL.match(url)
    if header is None:
        raise Refusal(400, f"{where}.url must be http(s) or data:image/…;base64, got {url[:40]!r}", where)
    wanted = IMAGE_FORMATS.get(header[1])
    if wanted is None:
        supported = ", ".join(IMAGE_FORMATS)
        raise Refusal(400, f"{where}: unsupported image type {header[1]}; supported: {supported}", where)
    try:
        data = base64.b64decode(url[header.end() :], validate=True)
    except ValueError as error:
        raise Refusal(400, f"{where}.url is not valid base64: {error}", where, "invalid_base64") from None
    words = describe_image(data, wanted, where)
    if len(_checked_images) >= 10_000:
        _checked_images.clear()
    _checked_images[hash(url)] = words
    return words


def describe_image(data: bytes, wanted: str, where: str) -> str:
    """Decodes a picture to its last byte and names its format and size.

    Args:
        data: The file.
        wanted: Pillow's name of the format that the data URL declares.
        where: Path of the part, for the error.
    """
    try:
        with Image.open(io.BytesIO(data), formats=tuple(IMAGE_FORMATS.values())) as image:
            found, (width, height) = image.format, image.size
            found = "JPEG" if found == "MPO" else found  # a JPEG with more pictures behind the first
            # A JPEG decodes at an eighth of its size for a third of the time; a cut file is noticed all the same.
            image.draft(None, (1, 1))
            image.load()
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error, its bomb errors and more
        raise Refusal(400, f"{where}: not a readable image: {error}", where, "invalid_image") from None
    if found != wanted:
        raise Refusal(400, f"{where}: the URL declares {wanted}, the bytes are {found}", where, "invalid_image_format")
    return f"[image {found} {width}x{height}]"


def _check_fields(body: dict[str, Any], strict: bool) -> None:
    """Types and ranges of the top-level fields; null counts as not given."""
    for name, value in body.items():
        if name == "extra_body" or (strict and name not in KNOWN_FIELDS):
            raise Refusal(400, f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
        if value is None:
            continue
        if name in NUMBERS:
            _check_number(name, value)
        elif name in OTHER_TYPES and not isinstance(value, OTHER_TYPES[name][0]):
            raise Refusal(400, f"'{name}' must be {OTHER_TYPES[name][1]}, got {value!r}", name, "invalid_type")
    if body.get("stream"):
        raise Refusal(400, "the simulator does not stream", "stream", "unsupported_value")
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise Refusal(400, "'top_logprobs' needs 'logprobs': true", "top_logprobs")
    _check_stop(body.get("stop"))


def _check_number(name: str, value: Any) -> None:
    kind, least, greatest = NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        wanted = "an integer" if kind is int else "a number"
        raise Refusal(400, f"'{name}' must be {wanted}, got {value!r}", name, "invalid_type")
    if not least <= value <= greatest or (value == 0 and name in ABOVE_ZERO):
        bound = "above 0" if name in ABOVE_ZERO else f"at least {least}"
        raise Refusal(400, f"'{name}' must be {bound} and at most {greatest}, got {value}", name, "invalid_value")


def _check_stop(stop: Any) -> None:
    if stop is None or isinstance(stop, str):
        return
    if not isinstance(stop, list) or not 1 <= len(stop) <= 4 or not all(isinstance(word, str) for word in stop):
        raise Refusal(400, "'stop' must be a string or an array of 1 to 4 strings", "stop")
