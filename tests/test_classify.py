"""The tables of classify.py and errors.py: what a status, a body or an exception means."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import resource
import socket
import ssl
import struct
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_llm.classify import MAX_EXCERPT_BYTES, classify_response
from beam_llm.errors import MAX_MESSAGE_CHARS, Allowed, ErrorKind, Verdict, classify_exception

CANARY = "sk-canary-123456"
GOOD = {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]}


def verdict_on(status: int, body: Any, **keywords: Any) -> Verdict:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return classify_response(status, raw, **keywords)[0]


def error(code: Any = None, message: str = "m", **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, "code": code, **fields}}


# status, body, kind, flags: r = retryable, s = stops the run, h = shrinks the limit
TABLE: list[tuple[int, Any, ErrorKind | None, str]] = [
    (200, GOOD, None, ""),
    (200, {**GOOD, "error": None}, None, ""),
    # an error inside a 200
    (200, error(429, "slow down"), ErrorKind.RATE_LIMIT, "r"),
    (200, error("429"), ErrorKind.RATE_LIMIT, "r"),
    (200, error(502), ErrorKind.SERVER_ERROR, "r"),
    (200, error(400), ErrorKind.INVALID_REQUEST, ""),
    (200, error(401), ErrorKind.AUTHENTICATION, "s"),
    (200, error(), ErrorKind.SERVER_ERROR, "r"),
    (200, error("weird"), ErrorKind.SERVER_ERROR, "r"),
    (200, {"error": "boom"}, ErrorKind.SERVER_ERROR, "r"),
    (200, error(type="invalid_request_error"), ErrorKind.INVALID_REQUEST, ""),
    (200, error(type="insufficient_quota"), ErrorKind.QUOTA, "s"),
    (200, {"object": "error", "message": "m", "code": 400}, ErrorKind.INVALID_REQUEST, ""),
    (200, {**GOOD, **error(503)}, ErrorKind.OVERLOADED, "rh"),
    (
        200,
        {"choices": [{"error": {"code": 502, "message": "m"}, "finish_reason": "error"}]},
        ErrorKind.SERVER_ERROR,
        "r",
    ),
    # a 200 that is no answer
    (200, {"choices": []}, ErrorKind.EMPTY_CHOICES, "r"),
    (200, {"choices": None}, ErrorKind.EMPTY_CHOICES, "r"),
    (200, {}, ErrorKind.INVALID_RESPONSE, "r"),
    (200, {"choices": "x"}, ErrorKind.INVALID_RESPONSE, "r"),
    (200, {"choices": [None]}, ErrorKind.INVALID_RESPONSE, "r"),
    (200, {"choices": [{"finish_reason": "stop"}]}, ErrorKind.INVALID_RESPONSE, "r"),
    (200, [GOOD], ErrorKind.INVALID_RESPONSE, "r"),
    (200, b"", ErrorKind.INVALID_RESPONSE, "r"),
    (200, b"<html><title>Login</title></html>", ErrorKind.INVALID_RESPONSE, "r"),
    (200, b'{"choices": [', ErrorKind.INVALID_RESPONSE, "r"),
    (200, {"choices": [{"message": {}, "finish_reason": "abort"}]}, ErrorKind.ABORTED, "r"),
    (200, {"choices": [*GOOD["choices"], {"message": {}, "finish_reason": "abort"}]}, ErrorKind.ABORTED, "r"),
    (200, {"choices": [{"message": {}, "finish_reason": "error"}]}, ErrorKind.SERVER_ERROR, "r"),
    # permanent
    (400, {}, ErrorKind.INVALID_REQUEST, ""),
    (400, b"", ErrorKind.INVALID_REQUEST, ""),
    (400, {"object": "error", "message": "At most 1 image", "code": 400}, ErrorKind.INVALID_REQUEST, ""),
    (401, {"error": "Unauthorized"}, ErrorKind.AUTHENTICATION, "s"),
    (401, error("invalid_api_key", type="invalid_request_error"), ErrorKind.AUTHENTICATION, "s"),
    (402, {}, ErrorKind.QUOTA, "s"),
    (403, {}, ErrorKind.PERMISSION, "s"),
    (404, error("model_not_found"), ErrorKind.NOT_FOUND, "s"),
    (404, {"detail": "Not Found"}, ErrorKind.NOT_FOUND, "s"),
    (413, b"<html><h1>413 Too Large</h1></html>", ErrorKind.TOO_LARGE, ""),
    (422, {"error": "x", "error_type": "validation"}, ErrorKind.INVALID_REQUEST, ""),
    (422, {"detail": [{"loc": ["body"], "msg": "x", "type": "missing"}]}, ErrorKind.INVALID_REQUEST, ""),
    (422, {"detail": [{"loc": ["body", "k"], "msg": "x", "type": "extra_forbidden"}]}, ErrorKind.INVALID_REQUEST, "s"),
    (400, error("unsupported_parameter", param="max_tokens"), ErrorKind.INVALID_REQUEST, "s"),
    (400, error(None, "Unrecognized request argument supplied: top_k"), ErrorKind.INVALID_REQUEST, "s"),
    (400, error("context_length_exceeded"), ErrorKind.CONTEXT_LENGTH, ""),
    (400, error(400, "This model's maximum context length is 2048 tokens"), ErrorKind.CONTEXT_LENGTH, ""),
    (400, error(400, type="exceed_context_size_error"), ErrorKind.CONTEXT_LENGTH, ""),
    (400, error("content_filter"), ErrorKind.CONTENT_FILTER, ""),
    (400, error("model_not_found"), ErrorKind.NOT_FOUND, "s"),
    (418, {}, ErrorKind.INVALID_REQUEST, ""),
    (302, b"", ErrorKind.NOT_FOUND, "s"),
    (501, error(501, type="not_supported_error"), ErrorKind.INVALID_REQUEST, "s"),
    (429, error("insufficient_quota"), ErrorKind.QUOTA, "s"),
    (429, error(None, type="insufficient_quota"), ErrorKind.QUOTA, "s"),
    (429, error("billing_hard_limit_reached"), ErrorKind.QUOTA, "s"),
    # transient
    (429, error("rate_limit_exceeded"), ErrorKind.RATE_LIMIT, "r"),
    (429, error("slow_down", type="rate_limit_error"), ErrorKind.RATE_LIMIT, "rh"),
    (429, {"error": "Model is overloaded", "error_type": "overloaded"}, ErrorKind.OVERLOADED, "rh"),
    (400, {"type": "error", "error": {"type": "overloaded_error"}}, ErrorKind.OVERLOADED, "rh"),
    (400, error("invalid_image_url", "Timeout while downloading http://h/x"), ErrorKind.TIMEOUT, "r"),
    (400, error("invalid_image_url", "Not an image"), ErrorKind.INVALID_REQUEST, ""),
    (408, {}, ErrorKind.TIMEOUT, "rh"),
    (409, {}, ErrorKind.SERVER_ERROR, "r"),
    (500, {"detail": [{"loc": ["body"], "msg": "x"}]}, ErrorKind.SERVER_ERROR, "r"),
    (503, b"upstream connect error", ErrorKind.OVERLOADED, "rh"),
    (529, {}, ErrorKind.OVERLOADED, "rh"),
    *((status, b"<html>" + b"x" * 20_000, ErrorKind.SERVER_ERROR, "r") for status in (502, 520, 521)),
    *((status, b"<html>" + b"x" * 20_000, ErrorKind.TIMEOUT, "rh") for status in (504, 522, 524)),
]


@pytest.mark.parametrize(("status", "body", "kind", "flags"), TABLE)
def test_status_with_body_gets_its_verdict(status: int, body: Any, kind: ErrorKind | None, flags: str) -> None:
    """C01, C02, C08, C10, C11, C12, C13, C14, C15, C17, C18."""
    verdict = verdict_on(status, body)
    signs = (verdict.retryable, verdict.stops_run, verdict.shrinks)
    assert (verdict.kind, signs) == (kind, tuple(sign in flags for sign in "rsh"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (error(None, "nested"), "nested"),
        ({"object": "error", "message": "flat", "type": "BadRequestError", "code": 400}, "flat"),
        ({"error": "a string", "error_type": "validation"}, "a string"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"detail": [{"loc": ["body", "n"], "msg": "too big"}]}, "body.n: too big"),
        ([{"error": {"code": 400, "message": "in a list"}}], "in a list"),
        (
            error(None, "Provider returned error", metadata={"raw": "pool exhausted"}),
            "Provider returned error: pool exhausted",
        ),
        (
            {"error": {"code": "content_filter", "innererror": {"violence": 1}}},
            '{"code": "content_filter", "innererror": {"violence": 1}}',
        ),
        (b"<html><head><title>502 Bad\nGateway</title></head></html>", "502 Bad Gateway"),
        (b"<html><style>p {}</style><h1>No &amp; route</h1><p>at all</p></html>", "No & route at all"),
        (b"<html></html>", "<html></html>"),
        (b"upstream connect error", "upstream connect error"),
        (b'"just a string"', "just a string"),
        (b"", "HTTP 400 Bad Request with nothing in the body"),
        (b"{}", "HTTP 400 Bad Request with nothing in the body"),
    ],
)
def test_message_is_the_servers_own_words(body: Any, message: str) -> None:
    """C10, C91."""
    assert verdict_on(400, body).message == message


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (error("c", type="t"), "c"),
        (error(None, type="t"), "t"),
        (error(400), "400"),
        ({"error_type": "e"}, "e"),
        ({}, None),
    ],
)
def test_code_is_the_most_telling_name(body: Any, code: str | None) -> None:
    assert verdict_on(400, body).code == code


def test_should_retry_header_overrules_the_tables_but_never_revives_a_spent_quota() -> None:
    revived = verdict_on(401, {}, should_retry="true")
    assert (revived.retryable, revived.stops_run) == (True, False)
    assert not verdict_on(500, {}, should_retry="false").retryable
    assert verdict_on(500, {}, should_retry="maybe").retryable
    spent = verdict_on(429, error("insufficient_quota"), should_retry="true")
    assert (spent.retryable, spent.stops_run) == (False, True)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/embeddings", {"data": []}, None),
        ("/v1/responses", {"output": [], "error": None}, None),
        ("/v1/embeddings", error(429), ErrorKind.RATE_LIMIT),
        ("/v1/completions", {"choices": [{"text": "x"}]}, None),
        ("/v1/completions", {"choices": []}, ErrorKind.EMPTY_CHOICES),
        ("/openai/deployments/d/chat/completions/", {"data": []}, ErrorKind.INVALID_RESPONSE),
    ],
)
def test_only_completion_paths_demand_choices(path: str, body: Any, kind: ErrorKind | None) -> None:
    assert verdict_on(200, body, path=path).kind is kind


@pytest.mark.parametrize(
    ("content", "read"),
    [
        (b'"a"', "a"),
        (b'"abc\\ud835def"', "abc\ufffddef"),
        (b'"\xe0A"', "\ufffdA"),
        (b"NaN", None),
        (b"-Infinity", None),
        ('"\u2028 é"'.encode(), "\u2028 é"),
    ],
)
@pytest.mark.parametrize("lead", [b"", b"\n \r\n" * 50, b"\xef\xbb\xbf"])
def test_body_that_bends_json_is_read_as_an_answer(lead: bytes, content: bytes, read: str | None) -> None:
    """C20, C57, C58."""
    verdict, body = classify_response(200, lead + b'{"choices":[{"message":{"content":' + content + b"}}]}")
    assert verdict.kind is None
    assert body == {"choices": [{"message": {"content": read}}]}


def test_excerpt_is_valid_text_of_two_kilobytes() -> None:
    assert verdict_on(200, GOOD).excerpt is None
    assert verdict_on(500, b"").excerpt is None
    assert verdict_on(500, "é".encode() * 5000).excerpt == "é" * (MAX_EXCERPT_BYTES // 2)
    assert verdict_on(500, b"x" + "é".encode() * 5000).excerpt == "x" + "é" * (MAX_EXCERPT_BYTES // 2 - 1)


def test_a_key_that_the_server_repeats_is_not_passed_on() -> None:
    verdict = verdict_on(401, error("invalid_api_key", f"bad key {CANARY}, header 'Bearer abc123def456'"))
    assert verdict.message == "bad key sk-***, header 'Bearer ***'"
    assert CANARY not in (verdict.excerpt or "")
    assert verdict_on(401, error(None, "Bearer authentication required")).message == "Bearer authentication required"


FIELDS = st.sampled_from(["error", "message", "code", "type", "detail", "loc", "msg", "metadata", "raw", "choices"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(FIELDS, inner),
).map(lambda value: json.dumps(value).encode())


@given(st.integers(-1, 1000), st.binary() | JSON, st.sampled_from([None, "true", "false", "x"]))
def test_any_response_gets_a_verdict_with_words(status: int, raw: bytes, should_retry: str | None) -> None:
    verdict, body = classify_response(status, raw, should_retry=should_retry)
    assert 0 < len(verdict.message.strip()) <= MAX_MESSAGE_CHARS
    assert not (verdict.retryable and verdict.stops_run)
    assert verdict.kind is not None or (body is not None and 200 <= status < 300)
    assert len((verdict.excerpt or "").encode()) <= MAX_EXCERPT_BYTES


# From here on: real exceptions, raised by aiohttp against a server that follows a script.

LIMITS = aiohttp.ClientTimeout(total=None, sock_connect=2, sock_read=0.05)
HEAD = b"HTTP/1.1 200 OK\r\n"
SPOILT_GZIP = gzip.compress(b'{"a":1}' * 9)[:-8] + bytes(8)


def script(reply: bytes = b"", end: str = "close") -> Callable[..., Awaitable[None]]:
    """Reads a request, sends `reply`, then closes, resets or stalls."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(reply)
        if end == "stall":
            await reader.read()
        if end == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    return serve


CLOSES = script()


def _allowed(timeout: aiohttp.ClientTimeout) -> Allowed:
    return Allowed(timeout.sock_connect, timeout.sock_read, timeout.total)


async def provoke(
    serve: Callable[..., Awaitable[None]] = CLOSES,
    url: str = "http://127.0.0.1:{port}/v1",
    *,
    tls: ssl.SSLContext | None = None,
    timeout: aiohttp.ClientTimeout = LIMITS,
    proxy: str | None = None,
) -> Exception:
    """Posts to a scripted server; returns what aiohttp raised. `{port}` in url and proxy is the server's."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    async with aiohttp.ClientSession(timeout=timeout, headers={"Authorization": f"Bearer {CANARY}"}) as session:
        try:
            target, via = url.format(port=port), proxy and proxy.format(port=port)
            async with session.post(target, data=b"{}", proxy=via) as response:
                await response.read()
        except Exception as exc:  # whatever it is, the test looks at it
            return exc
        finally:
            server.close()
    raise AssertionError("the request succeeded")


TLS_URL = "https://127.0.0.1:{port}/v1"
SHORT = script(HEAD + b"Content-Length: 500\r\n\r\nxx")
NO_LAST_CHUNK = script(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
BAD_GZIP = script(HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(SPOILT_GZIP) + SPOILT_GZIP)
STALL = script(end="stall")
STALL_IN_BODY = script(HEAD + b"Content-Length: 9\r\n\r\n", "stall")
DEAD_PROXY = {"proxy": "http://127.0.0.1:1"}
REFUSING_PROXY = {"serve": script(b"HTTP/1.1 407 No\r\n\r\n"), "proxy": "http://u:secret-word@127.0.0.1:{port}"}
TIRED_PROXY = {"serve": script(b"HTTP/1.1 503 No\r\n\r\n"), "proxy": "http://127.0.0.1:{port}"}

# was the body sent, what happens, kind, flags as above, words in the message
PROVOKED: list[tuple[bool, dict[str, Any], ErrorKind, str, str]] = [
    (True, {"serve": CLOSES}, ErrorKind.DISCONNECTED, "r", "after the request was sent"),
    (False, {"serve": CLOSES}, ErrorKind.CONNECT, "r", "before the request was sent"),
    (True, {"serve": script(end="reset")}, ErrorKind.DISCONNECTED, "rh", "reset by peer"),
    (True, {"serve": SHORT}, ErrorKind.DISCONNECTED, "r", "2 of 500"),
    (True, {"serve": NO_LAST_CHUNK}, ErrorKind.DISCONNECTED, "r", "broke off"),
    (True, {"serve": BAD_GZIP}, ErrorKind.INVALID_RESPONSE, "r", "decompressed"),
    (True, {"serve": script(b"SSH-2.0\r\n\r\n")}, ErrorKind.INVALID_RESPONSE, "r", "not a valid HTTP response"),
    (True, {"serve": STALL}, ErrorKind.TIMEOUT, "rh", "within 0.05 s while waiting for the answer"),
    (True, {"serve": STALL_IN_BODY}, ErrorKind.TIMEOUT, "rh", "within 0.05 s while waiting for the answer"),
    (
        True,
        {"serve": STALL, "timeout": aiohttp.ClientTimeout(total=0.05)},
        ErrorKind.TIMEOUT,
        "rh",
        "total timeout: not",
    ),
    (False, {"url": "http://127.0.0.1:1/"}, ErrorKind.CONNECT, "rh", "127.0.0.1:1: Connect"),
    (False, {"url": "http://no-such.invalid/"}, ErrorKind.CONNECT, "r", "no-such.invalid"),
    (False, {"url": "http://user:secret-word@host:99999/"}, ErrorKind.CONNECT, "s", "base_url"),
    (False, {"url": "ftp://host/"}, ErrorKind.CONNECT, "s", "base_url"),
    (
        False,
        {"serve": script(b"HTTP/1.1 400 x\r\n\r\n"), "url": TLS_URL},
        ErrorKind.CONNECT,
        "s",
        "WRONG_VERSION_NUMBER",
    ),
    (False, {"serve": script(end="reset"), "url": TLS_URL}, ErrorKind.CONNECT, "rh", "reset by peer"),
    (False, DEAD_PROXY, ErrorKind.CONNECT, "rh", "the proxy at 127.0.0.1:1"),
    (False, {**REFUSING_PROXY, "url": "https://h/"}, ErrorKind.CONNECT, "s", "the proxy answered 407 No"),
    (False, {**TIRED_PROXY, "url": "https://h/"}, ErrorKind.CONNECT, "r", "the proxy answered 503"),
]


@pytest.mark.parametrize(("sent", "fault", "kind", "flags", "words"), PROVOKED)
def test_exception_gets_its_verdict(sent: bool, fault: dict[str, Any], kind: ErrorKind, flags: str, words: str) -> None:
    """C25, C32, C36."""
    exc = asyncio.run(asyncio.wait_for(provoke(**fault), 10))
    verdict = classify_exception(exc, sent=sent, allowed=_allowed(fault.get("timeout", LIMITS)))
    signs = (verdict.retryable, verdict.stops_run, verdict.shrinks)
    assert (verdict.kind, signs) == (kind, tuple(sign in flags for sign in "rsh"))
    assert words in verdict.message
    assert CANARY not in verdict.message
    assert "secret-word" not in verdict.message


def test_untrusted_certificate_stops_the_run(tmp_path: Path) -> None:
    names = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        "/CN=x",
    ]
    subprocess.run([*command, *names], check=True, capture_output=True, timeout=20)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    exc = asyncio.run(asyncio.wait_for(provoke(CLOSES, "https://127.0.0.1:{port}/", tls=context), 10))
    verdict = classify_exception(exc, sent=False)
    assert (verdict.kind, verdict.retryable, verdict.stops_run) == (ErrorKind.CONNECT, False, True)
    assert verdict.message.startswith("the server's certificate is not trusted: self")


def test_connect_timeout_is_a_connect_failure_that_names_the_limit() -> None:
    # Nobody accepts from this socket; the backlog is full after a few connections, so that the next one waits.
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        callers = [socket.socket() for _ in range(4)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.1", port))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=0.05)
        exc = asyncio.run(asyncio.wait_for(provoke(CLOSES, f"http://127.0.0.1:{port}/", timeout=timeout), 10))
        for caller in callers:
            caller.close()
    verdict = classify_exception(exc, sent=False, allowed=_allowed(timeout))
    assert (verdict.kind, verdict.retryable, verdict.shrinks) == (ErrorKind.CONNECT, True, True)
    assert verdict.message == "connect timeout: no connection within 0.05 s"


def test_exhausted_descriptors_are_named() -> None:
    """C30."""

    async def post_without_descriptors() -> Exception:
        async with aiohttp.ClientSession() as session:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))  # descriptors from `free` on are refused
            try:
                await session.post("http://127.0.0.1:1/", data=b"{}")
            except Exception as exc:  # whatever it is, the test looks at it
                return exc
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        raise AssertionError("the request succeeded")

    verdict = classify_exception(asyncio.run(post_without_descriptors()), sent=False)
    assert (verdict.kind, verdict.retryable) == (ErrorKind.CONNECT, True)
    assert "file descriptors" in verdict.message


@pytest.mark.parametrize("exc", [asyncio.TimeoutError(), ConnectionResetError(), OSError(), ValueError(f"h: {CANARY}")])
@pytest.mark.parametrize("sent", [True, False])
def test_exception_without_text_still_gets_words(exc: Exception, sent: bool) -> None:
    verdict = classify_exception(exc, sent=sent)
    assert verdict.message.strip()
    assert CANARY not in verdict.message
    assert verdict.retryable is not isinstance(exc, ValueError)
