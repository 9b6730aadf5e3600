"""A ChatClient in a test: asked one request at a time or many, against servers whose faults are scripted."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web

from beam_llm.body import BodyBuilder, PreparedRequest
from beam_llm.client import ChatClient
from beam_llm.config import ChatConfig
from beam_llm.course import Attempt, Course
from beam_llm.errors import Verdict
from beam_llm.limits import InFlightLimit
from beam_llm.records import ChatRequest, Outcome
from beam_llm.retry import RetryPolicy
from tests.endpoint import ScriptedEndpoint, answer, last_text

QUICK = RetryPolicy(max_retries=3, initial_backoff_s=0.001, max_backoff_s=0.002)
REPLY = b'{"choices":[{"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}'


class Asking:
    """A client with its limit, and every verdict that it told of."""

    def __init__(self, *base_urls: str, clock: Callable[[], float] = time.monotonic, **settings: Any) -> None:
        settings = {"retry": QUICK, "max_in_flight": 64, **settings}
        self.config = ChatConfig(base_urls=base_urls, model="m", **settings)
        self.limit = InFlightLimit(self.config.max_in_flight)
        self.verdicts: list[Verdict] = []
        self.judged_once = asyncio.Event()
        self.sent = 0
        self.weights: list[int] = []
        self.client = ChatClient(self.config, None, self.limit, self, clock=clock, rng=random.Random(1))

    def started(self, course: Course) -> None:
        self.sent += 1

    def judged(self, course: Course, attempt: Attempt) -> None:
        self.verdicts.append(attempt.verdict)
        self.judged_once.set()

    async def __call__(self, content: Any = "hello", **fields: Any) -> Outcome:
        """One request's outcome; it waits for a slot first, as a row in the driver's queue does."""
        body = {"messages": content, **fields}
        prepared = BodyBuilder(self.config).prepare(ChatRequest("id", body))
        assert isinstance(prepared, PreparedRequest)
        await self.limit.retake()
        return await self.client.complete(prepared, self.weights.append)

    async def many(self, count: int) -> list[Outcome]:
        return await asyncio.gather(*(self(f"row {n}") for n in range(count)))

    def tries(self, base_url: str) -> tuple[int, int]:
        """Tries at an endpoint, and how many of them failed."""
        return next((e.requests, e.failures) for e in self.client.endpoints if e.base_url == base_url)


def run(asking: Callable[[], Asking], work: Callable[[Asking], Coroutine[Any, Any, None]]) -> Asking:
    """Works with a client to the end, which must come within 20 s and leave no slot taken."""

    async def to_end() -> Asking:
        ask = asking()
        try:
            await asyncio.wait_for(work(ask), 20)
        finally:
            await ask.client.close()
        assert (ask.limit.open, ask.limit.free) == (0, ask.limit.maximum)
        return ask

    return asyncio.run(to_end())


def outcome(endpoint: ScriptedEndpoint | str, content: Any = "hello", **settings: Any) -> Outcome:
    """What becomes of one request."""
    outcomes: list[Outcome] = []

    async def work(ask: Asking) -> None:
        outcomes.append(await ask(content))

    run(lambda: Asking(endpoint if isinstance(endpoint, str) else endpoint.base_url, **settings), work)
    return outcomes[0]


def failing(*answers: web.Response | Callable[[web.Request], Awaitable[web.StreamResponse]]) -> ScriptedEndpoint:
    """A server that gives these answers first, then good ones. A response may be given only once."""
    left = list(answers)

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not left:
            return answer(last_text(body))
        first = left.pop(0)
        return first if isinstance(first, web.Response) else await first(request)

    return ScriptedEndpoint(handle)


def error(status: int, **headers: str) -> web.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.json_response({"error": {"message": f"status {status}"}}, status=status, headers=named)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    return await reader.readexactly(length)


def http(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (size, body)


async def serve(connected: Connected, port: int = 0) -> tuple[asyncio.Server, str]:
    server = await asyncio.start_server(connected, "127.0.0.1", port)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
