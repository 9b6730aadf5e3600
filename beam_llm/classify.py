"""What a response means: (status, body) -> Verdict, by tables."""

from __future__ import annotations

import codecs
import html
import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from beam_llm import jsontext
from beam_llm.errors import ErrorKind, Verdict, clip, redact
from beam_llm.records import CHAT_COMPLETIONS

MAX_EXCERPT_BYTES = 2048
_MAX_HTML_BYTES = 8192

_ANSWER = Verdict(None, retryable=False, message="answered")
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


@dataclass(frozen=True, slots=True)
class _Rule:
    kind: ErrorKind
    retryable: bool = False
    stops_run: bool = False
    shrinks: bool = False


_QUOTA = _Rule(ErrorKind.QUOTA, stops_run=True)
_NOT_FOUND = _Rule(ErrorKind.NOT_FOUND, stops_run=True)
_INVALID = _Rule(ErrorKind.INVALID_REQUEST)
_REFUSED_PARAMETER = _Rule(ErrorKind.INVALID_REQUEST, stops_run=True)
_CONTEXT = _Rule(ErrorKind.CONTEXT_LENGTH)
_FILTERED = _Rule(ErrorKind.CONTENT_FILTER)
_OVERLOADED = _Rule(ErrorKind.OVERLOADED, retryable=True, shrinks=True)
_SLOW_DOWN = _Rule(ErrorKind.RATE_LIMIT, retryable=True, shrinks=True)
_SERVER = _Rule(ErrorKind.SERVER_ERROR, retryable=True)
_TIMEOUT = _Rule(ErrorKind.TIMEOUT, retryable=True, shrinks=True)
_GARBLED = _Rule(ErrorKind.INVALID_RESPONSE, retryable=True)
_NO_ROUTE = _Rule(ErrorKind.CONNECT, stops_run=True)

# 408, 409 and 5xx are retried as openai-python does. 501 is llama.cpp's "this server does not support …"; 52x are
# Cloudflare's, 529 Anthropic's and Bedrock's "overloaded".
_BY_STATUS = {
    400: _INVALID,
    401: _Rule(ErrorKind.AUTHENTICATION, stops_run=True),
    402: _QUOTA,
    403: _Rule(ErrorKind.PERMISSION, stops_run=True),
    404: _NOT_FOUND,
    405: _NOT_FOUND,
    407: _NO_ROUTE,
    408: _TIMEOUT,
    409: _SERVER,
    410: _NOT_FOUND,
    413: _Rule(ErrorKind.TOO_LARGE),
    425: _SERVER,
    429: _Rule(ErrorKind.RATE_LIMIT, retryable=True),
    501: _REFUSED_PARAMETER,
    503: _OVERLOADED,
    504: _TIMEOUT,
    522: _TIMEOUT,
    524: _TIMEOUT,
    529: _OVERLOADED,
}

# A `code` or `type` that says more than the status does, whatever the status: OpenAI sends an empty account as 429,
# routers send overload as 400.
_BY_CODE = {
    code: rule
    for rule, codes in (
        (_QUOTA, "insufficient_quota credit_balance_exhausted billing_hard_limit_reached billing_not_active"),
        (_QUOTA, "organization_spend_limit_exceeded project_spend_limit_exceeded organization_usage_limit_exceeded"),
        (_CONTEXT, "context_length_exceeded exceed_context_size_error"),
        (_FILTERED, "content_filter content_policy_violation data_inspection_failed"),
        (_NOT_FOUND, "model_not_found deploymentnotfound"),
        (_REFUSED_PARAMETER, "unsupported_parameter unknown_parameter unsupported_value extra_forbidden"),
        (_SLOW_DOWN, "slow_down"),
        (_OVERLOADED, "overloaded overloaded_error server_is_overloaded engine_overloaded"),
    )
    for code in codes.split()
}

# What these say counts only inside a 200: OpenAI's own 401 has the type `invalid_request_error`.
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "invalid_prompt": 400,
    "invalid_api_key": 401,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
}

# Texts, where a server gives nothing else to go by: vLLM and SGLang on context, old OpenAI on unknown fields, and
# OpenAI's 400 for a picture that it could not fetch in time, which often works a moment later.
_BY_TEXT_OF_400 = (
    (re.compile(r"context (?:length|size|window)|maximum model length", re.I), _CONTEXT),
    (re.compile(r"unrecognized request argument", re.I), _REFUSED_PARAMETER),
    (re.compile(r"(?:timeout|timed out) (?:while|when) downloading", re.I), _Rule(ErrorKind.TIMEOUT, retryable=True)),
)


def classify_response(
    status: int, raw: bytes, *, path: str = CHAT_COMPLETIONS, should_retry: str | None = None
) -> tuple[Verdict, dict[str, Any] | None]:
    """Judges a whole response. The content type plays no part: servers get it wrong.

    Args:
        status: HTTP status.
        raw: The body, decompressed.
        path: Of the request. Chat paths must answer with choices that hold messages, other `completions` with choices;
            elsewhere any JSON object without an error is an answer.
        should_retry: The `x-should-retry` header; `true` and `false` overrule the tables, as in openai-python, except
            that a spent quota is never retried.

    Returns:
        The verdict, and the body if it is a JSON object (or an error in a list, as Google sends it), read as leniently
        as `jsontext.loads` does.
    """
    value = _parse(raw)
    if status >= 400 and isinstance(value, list) and value:
        value = value[0]
    body = value if isinstance(value, dict) else None
    verdict = _judge_body(body, raw, path) if 200 <= status < 300 else _judge_failure(status, body, raw)
    if verdict.kind is None:
        return verdict, body
    if should_retry in ("true", "false") and verdict.kind is not ErrorKind.QUOTA:
        retryable = should_retry == "true"
        verdict = replace(verdict, retryable=retryable, stops_run=verdict.stops_run and not retryable)
    return replace(verdict, excerpt=_excerpt(raw)), body


def _judge_failure(status: int, body: dict[str, Any] | None, raw: bytes) -> Verdict:
    codes = _codes(body)
    words = _words(body, raw) or f"HTTP {status} {_PHRASES.get(status, '')}".rstrip() + " with nothing in the body"
    rule = next((_BY_CODE[code.lower()] for code in codes if code.lower() in _BY_CODE), None)
    if rule is None and status in (400, 413, 422):
        rule = next((rule for pattern, rule in _BY_TEXT_OF_400 if pattern.search(words)), None)
    return _verdict(rule or _rule_of_status(status), words, codes)


def _rule_of_status(status: int) -> _Rule:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if 300 <= status < 400:  # a redirect that was not followed: the base URL is wrong for every row
        return _NOT_FOUND
    if 400 <= status < 500:
        return _INVALID
    return _SERVER if 500 <= status < 600 else _GARBLED


def _verdict(rule: _Rule, words: str, codes: list[str]) -> Verdict:
    code = clip(codes[0]) or None if codes else None
    return Verdict(rule.kind, rule.retryable, words, code, rule.stops_run, rule.shrinks)


def _judge_body(body: dict[str, Any] | None, raw: bytes, path: str) -> Verdict:
    if body is None:
        words = _words(None, raw)
        return _verdict(_GARBLED, clip(f"the answer is not a JSON object: {words or 'it is empty'}"), [])
    if body.get("error") or body.get("object") == "error":
        return _judge_embedded(body, raw)
    if not path.rstrip("/").endswith("completions"):
        return _ANSWER
    choices = body.get("choices")
    if "choices" in body and not choices:
        return _verdict(_Rule(ErrorKind.EMPTY_CHOICES, retryable=True), "the list of choices is empty", [])
    if not isinstance(choices, list):
        return _verdict(_GARBLED, clip(f"the answer holds no choices: {_words(body, raw)}"), _codes(body))
    return _judge_choices(choices, needs_message=path.rstrip("/").endswith("/chat/completions"))


def _judge_choices(choices: list[Any], needs_message: bool) -> Verdict:
    for choice in choices:
        if not isinstance(choice, dict):
            return _verdict(_GARBLED, "a choice in the answer is not an object", [])
        if choice.get("error"):
            return _judge_embedded(choice, b"")
        reason = choice.get("finish_reason")
        if reason == "abort":  # SGLang
            return _verdict(_Rule(ErrorKind.ABORTED, retryable=True), "the generation was aborted", [])
        if reason == "error":  # routers whose upstream failed half-way
            return _verdict(_SERVER, "the generation failed (finish_reason error)", [])
        if needs_message and not isinstance(choice.get("message"), dict):
            return _verdict(_GARBLED, "a choice in the answer holds no message", [])
    return _ANSWER


def _judge_embedded(body: dict[str, Any], raw: bytes) -> Verdict:
    named = (
        int(code) if re.fullmatch("[45][0-9]{2}", code) else _STATUS_OF_TYPE.get(code.lower()) for code in _codes(body)
    )
    # Without a code, or with one that says nothing, it is an upstream's failure as a rule: tried again.
    return _judge_failure(next(filter(None, named), 500), body, raw)


def _codes(body: dict[str, Any] | None) -> list[str]:
    """The `code`s, `type`s and the like that an error body names, the most telling first."""
    if body is None:
        return []
    error = body.get("error")
    inner = error if isinstance(error, dict) else {}
    detail = body.get("detail")
    found = [inner.get("code"), inner.get("type"), inner.get("status"), body.get("code"), body.get("error_type")]
    found.append(body.get("type"))
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        found.append(detail[0].get("type"))
    return [str(code) for code in found if isinstance(code, (str, int)) and not isinstance(code, bool) and code != ""]


def _words(body: dict[str, Any] | None, raw: bytes) -> str:
    """The server's own words, clipped; empty if it sent none."""
    if not body:
        return clip(_text_of(raw)) if body is None else ""
    error = body.get("error")
    if isinstance(error, str):
        return clip(error) or clip(_dump(body))
    source = error if isinstance(error, dict) and error else body
    words = next((words for key in ("message", "detail", "msg") if (words := _sentence(source.get(key)))), "")
    metadata = source.get("metadata")
    # OpenRouter puts a set phrase in `message` and what the provider said here.
    upstream = _sentence(metadata.get("raw")) if isinstance(metadata, dict) else ""
    return clip(": ".join(filter(None, (words, upstream)))) or clip(_dump(source))


def _sentence(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list) and value and isinstance(value[0], dict):  # FastAPI: [{"loc": […], "msg": …}]
        places = value[0].get("loc")
        where = ".".join(map(str, places)) if isinstance(places, list) else ""
        return ": ".join(filter(None, (where, _sentence(value[0].get("msg")))))
    return _dump(value) if isinstance(value, dict) and value else ""


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text_of(raw: bytes) -> str:
    text = raw[:_MAX_HTML_BYTES].decode("utf-8", "replace").strip().strip('"')
    if not text.startswith("<"):
        return text
    title = re.search(r"<title[^<>]*>([^<]*)", text, re.I)
    if title and title[1].strip():
        return html.unescape(title[1])
    visible = re.sub(r"<(script|style)\b.*?(</\1>|$)|<!--.*?(-->|$)", " ", text, flags=re.I | re.S)
    return html.unescape(re.sub(r"<[^>]*(>|$)", " ", visible)).strip() or text


def _excerpt(raw: bytes) -> str | None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(raw[:MAX_EXCERPT_BYTES], len(raw) <= MAX_EXCERPT_BYTES)
    # Replacement characters are longer than the bytes that they stand for.
    return redact(text).encode()[:MAX_EXCERPT_BYTES].decode("utf-8", "ignore") or None


def _parse(raw: bytes) -> Any:
    """The JSON value, bytes that are not UTF-8 read as U+FFFD; None if it is not JSON."""
    with suppress(ValueError):
        return jsontext.loads(raw)
    with suppress(ValueError):
        return jsontext.loads(raw.decode("utf-8", "replace").encode())
    return None
