"""What the simulator answers: deterministic completions that echo the prompt, error objects, and broken bodies."""

from __future__ import annotations

import zlib
from typing import Any

import orjson

from beam_llm.simulator.checks import Prompt, Refusal

CREATED = 1_750_000_000
"""`created` of every answer, in Unix seconds: fixed, so that the same request has the same answer."""

HTML_PAGE = b"<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>\r\n"
NOT_JSON = b"upstream connect error or disconnect/reset before headers"

MAX_SCHEMA_DEPTH = 20
"""A schema that is still not done at this depth requires itself without end."""

_ERROR_TYPES = {
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", None),
    429: ("requests", "rate_limit_exceeded"),
    503: ("server_error", "server_is_overloaded"),
    529: ("server_error", "server_is_overloaded"),
}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """OpenAI's nested error object; `code` None takes the usual one of the status."""
    default = "server_error" if status >= 500 else "invalid_request_error"
    kind, usual_code = _ERROR_TYPES.get(status, (default, None))
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code or usual_code}})


def answer_text(prompt: Prompt) -> str:
    """What the model says: the prompt's text and then its pictures, or JSON made of them if the request asks for JSON.

    Raises:
        Refusal: A `response_format` that cannot be met.
    """
    echo = " ".join((prompt.text, *prompt.images)).strip()
    response_format = prompt.body.get("response_format")
    if response_format is None:
        return echo
    kind = response_format.get("type")
    if kind == "text":
        return echo
    if kind == "json_object":
        return orjson.dumps({"answer": echo}).decode()
    if kind != "json_schema":
        kinds = "text, json_object or json_schema"
        raise Refusal(400, f"response_format.type must be {kinds}, got {kind!r}", "response_format")
    return orjson.dumps(_example_for(response_format.get("json_schema"), echo)).decode()


def build_answer(prompt: Prompt, answer_id: str) -> dict[str, Any]:
    """The chat completion for a good request. Tokens are words.

    Raises:
        Refusal: As `answer_text`.
    """
    body = prompt.body
    text, finish_reason = answer_text(prompt), "stop"
    words = text.split()
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and limit < len(words):
        words = words[:limit]
        text, finish_reason = " ".join(words), "length"
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    thinking_tokens = 0
    if (body.get("chat_template_kwargs") or {}).get("enable_thinking") is True:
        message["reasoning_content"] = f"The user wrote: {prompt.text}"
        thinking_tokens = len(message["reasoning_content"].split())
    logprobs = _logprobs(words, body.get("top_logprobs") or 0) if body.get("logprobs") else None
    count = body.get("n") or 1
    choices = [
        {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
        for index in range(count)
    ]
    completion_tokens = (len(words) + thinking_tokens) * count
    usage: dict[str, Any] = {
        "prompt_tokens": prompt.tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt.tokens + completion_tokens,
    }
    if thinking_tokens:
        usage["completion_tokens_details"] = {"reasoning_tokens": thinking_tokens * count}
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": CREATED,
        "model": body["model"],
        "choices": choices,
        "usage": usage,
        "system_fingerprint": None,
    }


def faulty_body(fault: str, answer: dict[str, Any]) -> bytes:
    """The body of a response that is broken in the way that `fault` names (see `FAULTS`); sound for any other name."""
    if fault == "error_in_200":
        return error_body(500, "simulated fault: the engine died after the headers had been sent")
    if fault == "not_json":
        return NOT_JSON
    if fault == "empty_choices":
        answer = {**answer, "choices": []}
    elif fault == "null_content":
        answer = {**answer, "choices": [_without_content(choice) for choice in answer["choices"]]}
    return orjson.dumps(answer)


def _without_content(choice: dict[str, Any]) -> dict[str, Any]:
    return {**choice, "message": {**choice["message"], "content": None}}


def _logprobs(words: list[str], top: int) -> dict[str, Any]:
    """One entry a word; as many alternatives as were asked for, all of them made up."""
    content = []
    for word in words:
        entry = {"token": word, "logprob": -0.1, "bytes": list(word.encode())}
        others = [{"token": f"{word}~{rank}", "logprob": -1.0 - rank, "bytes": None} for rank in range(1, top)]
        content.append({**entry, "top_logprobs": [entry, *others][:top]})
    return {"content": content, "refusal": None}


def _example_for(json_schema: Any, echo: str) -> Any:
    if not isinstance(json_schema, dict) or not isinstance(json_schema.get("name"), str):
        raise Refusal(400, "response_format.json_schema must be an object with a name", "response_format.json_schema")
    schema = json_schema.get("schema")
    if not isinstance(schema, dict):
        raise Refusal(400, "response_format.json_schema.schema must be an object", "response_format.json_schema")
    if not isinstance(json_schema.get("strict", False), (bool, type(None))):
        raise Refusal(400, "response_format.json_schema.strict must be a boolean", "response_format.json_schema")
    try:
        return example_of_schema(schema, echo)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        message = f"Invalid schema for response_format '{json_schema['name']}': {error}"
        raise Refusal(400, message, "response_format") from None


def example_of_schema(schema: dict[str, Any], echo: str) -> Any:
    """A small value that a simple JSON schema accepts: strings repeat `echo`, which also picks among enum values.

    Args:
        schema: const, enum, anyOf/oneOf (the first), local `$ref`, type, properties, items and the bounds of strings,
            numbers and arrays are followed; `pattern`, `format`, `multipleOf`, `allOf` and `not` are not.
        echo: The text to repeat.

    Raises:
        ValueError, KeyError, TypeError: The schema is not one.
    """
    return _example(schema, schema, echo, 0)


def _example(schema: dict[str, Any], root: dict[str, Any], echo: str, depth: int) -> Any:
    if depth > MAX_SCHEMA_DEPTH:
        raise ValueError("it requires itself without end")
    if "$ref" in schema:
        return _example(_resolve(schema["$ref"], root), root, echo, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][zlib.crc32(echo.encode()) % len(schema["enum"])]
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return _example(schema[union][0], root, echo, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        properties, required = schema.get("properties", {}), schema.get("required", ())
        # What is optional ends a schema that may contain itself.
        wanted = [name for name in properties if depth < MAX_SCHEMA_DEPTH // 4 or name in required]
        return {name: _example(properties[name], root, echo, depth + 1) for name in wanted}
    if kind == "array":
        count = max(schema.get("minItems", 0), 1 if depth < MAX_SCHEMA_DEPTH // 4 else 0)
        count = min(count, schema.get("maxItems", count))
        return [_example(schema.get("items", {}), root, echo, depth + 1) for _ in range(count)]
    return _scalar(kind, schema, echo)


def _scalar(kind: Any, schema: dict[str, Any], echo: str) -> Any:
    if kind == "string":
        return echo.ljust(schema.get("minLength", 0), ".")[: schema.get("maxLength")]
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    if kind not in ("integer", "number"):
        raise ValueError(f"unknown type {kind!r}")
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if kind == "number" and low is not None and high is not None:
        return (low + high) / 2
    for bound, shift in (("minimum", 0), ("exclusiveMinimum", 1), ("maximum", 0), ("exclusiveMaximum", -1)):
        if bound in schema:
            return schema[bound] + shift
    return 1


def _resolve(reference: str, root: dict[str, Any]) -> dict[str, Any]:
    """The part of `root` that a reference such as `#/$defs/Person` names."""
    if not reference.startswith("#"):
        raise ValueError(f"$ref {reference!r} does not start with '#'")
    target: Any = root
    for name in reference[1:].strip("/").split("/") if reference != "#" else ():
        target = target[name]
    if not isinstance(target, dict):
        raise TypeError(f"$ref {reference!r} names no schema")
    return target
