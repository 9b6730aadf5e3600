"""The simulator's HTTP side: routes, counts, the barrier, and what goes over the wire for each verdict."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from beam_llm.errors import ConfigError
from beam_llm.simulator.answers import HTML_PAGE, build_answer, error_body, faulty_body
from beam_llm.simulator.checks import Refusal, read_prompt
from beam_llm.simulator.script import CONNECTION_FAULTS, Script, Verdict, draw_verdict

OVERRIDE_HEADER = "x-simulate"
"""Request header with a script line that changes the script for this one request."""

INLINE_BYTES = 32 * 1024
"""Larger bodies carry pictures: they are checked in a thread, so that decoding does not hold up the others."""

_RST_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER on with 0 seconds: close() sends RST instead of FIN


class Counts:
    """What `/stats` tells. A request is open from the arrival of its headers until its answer is handed over."""

    def __init__(self) -> None:
        self.requests = 0
        self.peak_open = 0
        self.bytes_in = 0
        self.statuses: Counter[int] = Counter()
        self.faults: Counter[str] = Counter()
        self.attempts: Counter[int] = Counter()
        self.answered: Counter[int] = Counter()
        self.peers: set[Any] = set()

    def as_dict(self, open_now: int) -> dict[str, Any]:
        """The counts as JSON fields, documented in `python -m beam_llm.simulator --help`."""
        return {
            "requests": self.requests,
            "open": open_now,
            "peak_open": self.peak_open,
            "by_status": {str(status): count for status, count in sorted(self.statuses.items())},
            "by_fault": dict(sorted(self.faults.items())),
            "distinct_prompts": len(self.attempts),
            "answered": self.answered.total(),
            "distinct_answered": len(self.answered),
            "bytes_in": self.bytes_in,
            "connections": len(self.peers),
        }


class Simulator:
    """Request handlers and their state. All of it lives on one event loop.

    Args:
        script: The behaviour of every request that brings no override of its own.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.open = 0
        self.counts = Counts()
        self.rng = random.Random(script.seed)
        self.released = asyncio.Event()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        counts = self.counts
        counts.requests += 1
        request_id = f"req-{counts.requests:08x}"
        self.open += 1
        counts.peak_open = max(counts.peak_open, self.open)
        if request.transport is not None:
            counts.peers.add(request.transport.get_extra_info("peername"))
        try:
            response = await self._answer(request, request_id)
            if response is None:
                return web.Response()  # the connection is gone already; aiohttp drops what it cannot write
            counts.statuses[response.status] += 1
            return response
        except Refusal as refusal:
            counts.statuses[refusal.status] += 1
            body = error_body(refusal.status, refusal.message, refusal.param, refusal.code)
            return _respond(refusal.status, body, request_id, self.script.retry_after_s)
        except asyncio.CancelledError:
            counts.faults["client_left"] += 1
            raise
        finally:
            self.open -= 1

    async def _answer(self, request: web.Request, request_id: str) -> web.Response | None:
        """The response, or None if the connection was broken instead."""
        self.authorize(request)
        header = request.headers.get(OVERRIDE_HEADER)
        script = self.script if header is None else _override(self.script, header)
        counts = self.counts
        raw = await _read_body(request, script.max_body_bytes)
        counts.bytes_in += len(raw)
        if script.max_open and self.open > script.max_open:
            raise Refusal(429, f"more than {script.max_open} requests are open")
        if len(raw) <= INLINE_BYTES:
            prompt = read_prompt(raw, script)
        else:
            prompt = await asyncio.get_running_loop().run_in_executor(None, read_prompt, raw, script)
        answer = build_answer(prompt, f"chatcmpl-{request_id}")
        key, text = hash(raw), prompt.text
        del raw, prompt  # thousands of requests may wait below, and pictures are megabytes
        counts.attempts[key] += 1
        await self._pass_barrier(script.hold_until)
        verdict = draw_verdict(script, text, counts.attempts[key], self.rng)
        if verdict.delay_s:
            await asyncio.sleep(verdict.delay_s)
        if verdict.fault:
            counts.faults[verdict.fault] += 1
            return await _misbehave(request, script, verdict, answer, request_id)
        counts.answered[key] += 1
        return _respond(200, orjson.dumps(answer), request_id)

    async def _pass_barrier(self, hold_until: int) -> None:
        """Waits until `hold_until` requests are open; the one that completes the number releases all."""
        if hold_until and not self.released.is_set():
            if self.open >= hold_until:
                self.released.set()
            await self.released.wait()

    def authorize(self, request: web.Request) -> None:
        """Raises a 401 `Refusal` unless the script's key came along."""
        if self.script.api_key and request.headers.get("Authorization") != f"Bearer {self.script.api_key}":
            raise Refusal(401, "Incorrect API key provided")

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        try:
            self.authorize(request)
        except Refusal as refusal:
            return _respond(refusal.status, error_body(refusal.status, refusal.message))
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": "simulator"}
            for name in self.script.models or ("simulated",)
        ]
        return _respond(200, orjson.dumps({"object": "list", "data": listed}))

    async def health(self, request: web.Request) -> web.Response:
        """GET /health."""
        return web.Response()

    async def stats(self, request: web.Request) -> web.Response:
        """GET /stats."""
        return _respond(200, orjson.dumps(self.counts.as_dict(self.open)))

    async def zero(self, request: web.Request) -> web.Response:
        """POST /reset: zeroes the counts, seeds the draws anew, lets held requests go and sets up the barrier again."""
        self.released.set()
        self.released = asyncio.Event()
        self.rng = random.Random(self.script.seed)
        self.counts = Counts()
        self.counts.peak_open = self.open
        return web.Response()


async def create_app(script: Script) -> web.Application:
    """The simulator as an aiohttp application.

    Run it with `handler_cancellation=True` (as `aiohttp.test_utils` and `beam_llm.simulator` do): that is how a request
    that waits, or a stalled one, ends when its client leaves.
    """
    simulator = Simulator(script)
    app = web.Application()
    routes: tuple[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]], ...] = (
        ("POST", "/v1/chat/completions", simulator.chat),
        ("GET", "/v1/models", simulator.models),
        ("GET", "/health", simulator.health),
        ("GET", "/stats", simulator.stats),
        ("POST", "/reset", simulator.zero),
    )
    for method, path, handler in routes:
        app.router.add_route(method, path, handler)
        app.router.add_route("*", path, _wrong_method)
    app.router.add_route("*", "/{path:.*}", _wrong_path)
    return app


async def _wrong_method(request: web.Request) -> web.Response:
    return _respond(405, error_body(405, f"Not allowed to {request.method} on {request.path}"))


async def _wrong_path(request: web.Request) -> web.Response:
    return _respond(404, error_body(404, f"Invalid URL ({request.method} {request.path})"))


async def _read_body(request: web.Request, limit: int) -> bytes:
    """The body, without the copy that `request.read()` leaves on the request for as long as it is open."""
    if request.content_type != "application/json":
        raise Refusal(415, f"Content-Type must be application/json, got {request.content_type!r}")
    declared = request.content_length or 0
    chunks: list[bytes] = []
    size = 0
    while declared <= limit >= size:
        chunk = await request.content.readany()
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
        size += len(chunk)
    raise Refusal(413, f"request body of {max(declared, size)} bytes or more; the limit is {limit}")


async def _misbehave(
    request: web.Request, script: Script, verdict: Verdict, answer: dict[str, Any], request_id: str
) -> web.Response | None:
    """Answers with an error or a broken body; None if the connection was broken instead."""
    fault = verdict.fault
    if verdict.status != 200:
        code = script.fail_code or None if fault == "permanent" else None
        body = error_body(verdict.status, f"simulated {fault} error {verdict.status}", code=code)
        return _respond(verdict.status, body, request_id, script.retry_after_s)
    if fault == "html":
        return _respond(502, HTML_PAGE, request_id, content_type="text/html")
    if fault in CONNECTION_FAULTS:
        await _break_connection(request, fault, orjson.dumps(answer))
        return None
    return _respond(200, faulty_body(fault, answer), request_id)


async def _break_connection(request: web.Request, fault: str, body: bytes) -> None:
    """Breaks off in the way that `fault` names; returns once the connection is closed or closing."""
    transport = request.transport
    if transport is None:
        return
    if fault in ("truncate", "stall_body"):
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        transport.write(head.encode() + body[: len(body) // 2])
    if fault.startswith("stall"):
        await asyncio.Event().wait()  # ends by cancellation, when the client leaves or the server stops
    if fault == "reset":
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
        transport.abort()
    else:
        transport.close()


def _respond(
    status: int,
    body: bytes,
    request_id: str = "",
    retry_after_s: float | None = None,
    content_type: str = "application/json",
) -> web.Response:
    headers = {"Content-Type": content_type, "x-request-id": request_id}
    if retry_after_s is not None and status in (429, 503):
        headers["Retry-After"] = f"{retry_after_s:g}"
    return web.Response(body=body, status=status, headers=headers)


@functools.lru_cache(maxsize=1024)
def _override(script: Script, header: str) -> Script:
    try:
        return Script.from_query(header, base=script)
    except ConfigError as error:
        raise Refusal(400, f"header {OVERRIDE_HEADER}: {error}") from None
