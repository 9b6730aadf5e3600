"""The aiohttp session of a worker process and the payload that lets a body go once it is written."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from beam_llm.body import Body
from beam_llm.version import __version__

_IDLE_S = 4.0
"""Idle connections are dropped before uvicorn (vLLM, SGLang; 5 s) and llama.cpp (5 s) do it under our hands."""

_CHUNK_BYTES = 512 * 1024
"""Written in one piece, so that a body of many megabytes does not hold up the loop."""

_KEPT_BYTES = 16 * 1024
"""Bodies up to this size stay until the answer is there: a retry then has them at hand, and a thousand weigh 16 MB."""

# A connection that is silent for minutes while a model thinks must not be forgotten by a NAT gateway: the shortest
# timeouts seen are about 2 minutes. Names differ by platform; what is missing is left to the system's defaults.
_KEEPALIVE = (("TCP_KEEPIDLE", 45), ("TCP_KEEPALIVE", 45), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class OneShotPayload(payload.Payload):
    """Writes a `Body` in chunks and releases it if it is large. `written` tells whether the server may have it all."""

    _default_content_type = "application/json"
    written = False

    def __init__(self, body: Body, on_written: Callable[[], None]) -> None:
        super().__init__(None)
        self._body = body
        self._on_written = on_written
        self._size = body.size

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The body as text, for aiohttp's debug output."""
        return (self._body.data or b"").decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Writes the whole body."""
        pieces = self._body.pieces
        if pieces is None:
            raise RuntimeError("the body was sent before and is gone; build it again")
        for piece in pieces:
            if len(piece) <= _CHUNK_BYTES:
                await writer.write(piece)
                continue
            view = memoryview(piece)
            for start in range(0, len(piece), _CHUNK_BYTES):
                await writer.write(view[start : start + _CHUNK_BYTES])
        if self._body.size > _KEPT_BYTES:
            self._body.release()
        self.written = True
        self._on_written()

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """As `write`: our Content-Length is always the body's size."""
        await self.write(writer)


def open_session(*, max_connections: int, connect_timeout_s: float, api_key: str | None) -> aiohttp.ClientSession:
    """A session for one event loop; close it with `await session.close()`. A `Watch` ends what takes too long.

    Args:
        max_connections: The in-flight limit: aiohttp's own limit would be 100, and time spent waiting for a connection
            would count against the timeouts.
        connect_timeout_s: To open a connection.
        api_key: Sent as a bearer token; None sends none.
    """
    headers = {
        "Accept": "application/json",
        # aiohttp would also offer br and zstd when some package happens to be installed, and has failed to undo them.
        "Accept-Encoding": "gzip, deflate",
        "User-Agent": f"beam_llm/{__version__}",
    }
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=max_connections, keepalive_timeout=_IDLE_S, ttl_dns_cache=300, socket_factory=_keepalive_socket
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
    )


def proxy_for(url: URL) -> URL | None:
    """The proxy that the environment names for a URL (`HTTP_PROXY`, `HTTPS_PROXY`, `NO_PROXY`, in either case).

    Asked once for each URL. aiohttp's own `trust_env` would look at the environment and read ~/.netrc on another thread
    for every request: more than half of the CPU of a short one.

    Returns:
        Its URL, with user and password if the environment has them; None = go direct.
    """
    if url.host is None or proxy_bypass(f"{url.host}:{url.port}"):
        return None
    if not (named := getproxies().get(url.scheme)):
        return None
    return URL(named if "://" in named else f"http://{named}")


def _keepalive_socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
