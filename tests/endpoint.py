"""A loopback endpoint whose every answer a test scripts, on aiohttp.web in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def answer(text: str | None = "ok", *, finish_reason: str = "stop", **message: Any) -> web.Response:
    """A good completion."""
    return web.json_response(
        {
            "id": "chatcmpl-1",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, **message},
                    "finish_reason": finish_reason,
                }
            ],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        }
    )


def last_text(body: dict[str, Any]) -> str:
    """The text of the last message."""
    content = body["messages"][-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


async def echo(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answers with the last text."""
    return answer(last_text(body))


@dataclass
class ScriptedEndpoint:
    """A server for the time of a `with` block.

    Args:
        handler: Makes each answer; it gets the parsed JSON body.
    """

    handler: Handler = echo
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    open: int = 0
    peak: int = 0

    def __enter__(self) -> ScriptedEndpoint:
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        if not ready.wait(10):
            raise TimeoutError("the scripted endpoint did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._run(ready))
        self._loop.close()

    async def _run(self, ready: threading.Event) -> None:
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        self.port = runner.addresses[0][1]
        ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = orjson.loads(raw) if raw else {}
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.raw_path)
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            return await self.handler(request, body)
        finally:
            self.open -= 1
