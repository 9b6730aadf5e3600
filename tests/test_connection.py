"""The session and its one-shot payload against real servers on loopback: bytes, headers, cookies, proxies, sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web
from yarl import URL

from beam_llm.body import Body
from beam_llm.connection import OneShotPayload, open_session, proxy_for
from beam_llm.version import __version__

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Run = Callable[[Coroutine[Any, Any, None]], None]

LARGE = 3 * 1024 * 1024 + 17
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "REQUEST_METHOD")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine to its end on each kind of loop."""

    def run_to_end(work: Coroutine[Any, Any, None]) -> None:
        loop = request.param()
        try:
            loop.run_until_complete(asyncio.wait_for(work, 20))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    return run_to_end


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[int]:
    """A server on loopback that answers everything with `handler`; gives its port."""
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "localhost", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def session(**settings: Any) -> aiohttp.ClientSession:
    given = {"max_connections": 8, "connect_timeout_s": 5, "api_key": None, **settings}
    return open_session(**given)


async def fetch(client: aiohttp.ClientSession, port: int, data: OneShotPayload | None = None) -> aiohttp.ClientResponse:
    """The answer of a server on loopback, read whole; asked by way of the environment's proxy, as ChatClient does."""
    url = URL(f"http://localhost:{port}/")
    proxy = proxy_for(url)
    method = "GET" if data is None else "POST"
    async with client.request(method, url, data=data, proxy=proxy) as response:
        await response.read()
        return response


class Recorder:
    """A handler that keeps what came in and answers at once."""

    def __init__(self, **headers: str) -> None:
        self.requests: list[web.BaseRequest] = []
        self.bodies: list[bytes] = []
        self._headers = headers

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append(request)
        self.bodies.append(await request.content.read())
        return web.Response(text="{}", headers=self._headers)


def payload_of(data: bytes) -> tuple[Body, OneShotPayload, list[str]]:
    written: list[str] = []
    body = Body(data)
    return body, OneShotPayload(body, lambda: written.append("written")), written


@pytest.mark.parametrize("size", [0, 1, 16 * 1024, 16 * 1024 + 1, 256 * 1024, LARGE])
def test_the_whole_body_arrives_with_its_length(run: Run, size: int) -> None:
    data = os.urandom(size)
    body, payload, written = payload_of(data)

    async def work() -> None:
        recorder = Recorder()
        async with serving(recorder) as port, session() as client:
            assert (await fetch(client, port, payload)).status == 200
        headers = recorder.requests[0].headers
        assert recorder.bodies == [data]
        assert headers["Content-Length"] == str(size)
        assert headers["Content-Type"] == "application/json"
        assert "Transfer-Encoding" not in headers

    run(work())
    assert written == ["written"]
    assert payload.written
    assert body.size == size


def test_a_large_body_is_let_go_while_the_answer_is_still_to_come(run: Run) -> None:
    data = os.urandom(LARGE)
    references = sys.getrefcount(data)
    body, payload, written = payload_of(data)

    async def work() -> None:
        arrived, go_on = asyncio.Event(), asyncio.Event()

        async def think(request: web.BaseRequest) -> web.Response:
            assert len(await request.content.read()) == LARGE
            arrived.set()
            await go_on.wait()
            return web.Response(text="{}")

        async with serving(think) as port, session() as client:
            asked = asyncio.create_task(fetch(client, port, payload))
            await arrived.wait()
            await asyncio.sleep(0)
            assert (body.data, written) == (None, ["written"])
            assert sys.getrefcount(data) == references  # nobody but this test holds them: no view, no buffer
            assert not asked.done()
            go_on.set()
            assert (await asked).status == 200

    run(work())


def test_a_small_body_stays_for_a_retry(run: Run) -> None:
    body, payload, written = payload_of(b"x" * 16 * 1024)

    async def work() -> None:
        recorder = Recorder()
        async with serving(recorder) as port, session() as client:
            await fetch(client, port, payload)
            await fetch(client, port, OneShotPayload(body, lambda: None))
        assert recorder.bodies == [body.data] * 2

    run(work())
    assert written == ["written"]


def test_nothing_is_written_and_nothing_released_without_a_server(run: Run, unused_port: int) -> None:
    body, payload, written = payload_of(b"x" * LARGE)

    async def work() -> None:
        async with session() as client:
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.post(f"http://127.0.0.1:{unused_port}/", data=payload)

    run(work())
    assert not payload.written
    assert (written, body.data) == ([], b"x" * LARGE)


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_body_that_is_gone_cannot_be_sent_as_an_empty_one(run: Run) -> None:
    body, payload, _ = payload_of(b"x" * LARGE)
    body.release()

    async def work() -> None:
        recorder = Recorder()
        async with serving(recorder) as port, session() as client:
            with pytest.raises((RuntimeError, aiohttp.ClientError)):
                await fetch(client, port, payload)
        assert b"" not in recorder.bodies

    run(work())
    assert not payload.written


def test_only_encodings_that_every_client_can_undo_are_offered(run: Run) -> None:
    """C36: not br or zstd, whatever packages are installed."""

    async def work() -> None:
        recorder = Recorder()
        async with serving(recorder) as port, session() as client:
            assert client.headers["Accept-Encoding"] == "gzip, deflate"  # said by us: aiohttp's own offer varies
            await fetch(client, port)
        headers = recorder.requests[0].headers
        assert headers.getall("Accept-Encoding") == ["gzip, deflate"]
        assert headers["Accept"] == "application/json"
        assert headers["User-Agent"] == f"beam_llm/{__version__}"
        assert "Authorization" not in headers

    run(work())


def test_the_key_is_sent_as_a_bearer_token(run: Run) -> None:
    async def work() -> None:
        recorder = Recorder()
        async with serving(recorder) as port, session(api_key="sk-test") as client:
            await fetch(client, port)
        assert recorder.requests[0].headers.getall("Authorization") == ["Bearer sk-test"]

    run(work())


def test_no_cookie_is_ever_sent_back(run: Run) -> None:
    """C37: at a name, not an address, for which aiohttp would keep none anyway."""

    async def work() -> None:
        recorder = Recorder(**{"Set-Cookie": "sticky=backend-1; Path=/"})
        async with serving(recorder) as port, session() as client:
            for _ in range(3):
                assert (await fetch(client, port)).cookies["sticky"].value == "backend-1"
        assert [request.headers.get("Cookie") for request in recorder.requests] == [None] * 3

    run(work())


@pytest.mark.parametrize(
    ("variables", "by_proxy"),
    [
        ({}, False),
        ({"HTTP_PROXY": "proxy"}, True),
        ({"http_proxy": "proxy"}, True),
        ({"HTTPS_PROXY": "proxy"}, False),
        ({"HTTP_PROXY": "proxy", "NO_PROXY": "localhost"}, False),
        ({"HTTP_PROXY": "proxy", "NO_PROXY": "example.com"}, True),
    ],
)
def test_proxies_of_the_environment_are_used_and_their_exceptions_too(
    run: Run, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], by_proxy: bool
) -> None:
    """C35: a counting proxy sees the traffic, and excluded hosts go direct."""

    async def work() -> None:
        proxy, server = Recorder(), Recorder()
        async with serving(proxy) as proxy_port, serving(server) as port:
            for name, value in variables.items():
                monkeypatch.setenv(name, value.replace("proxy", f"http://127.0.0.1:{proxy_port}"))
            async with session() as client:
                assert (await fetch(client, port, payload_of(b"{}")[1])).status == 200
            assert (len(proxy.requests), len(server.requests)) == ((1, 0) if by_proxy else (0, 1))
            if by_proxy:
                assert proxy.bodies == [b"{}"]
                assert proxy.requests[0].headers["Host"] == f"localhost:{port}"

    run(work())


@pytest.mark.parametrize(
    ("variables", "url", "proxy"),
    [
        ({}, "http://h/v1", None),
        ({"HTTP_PROXY": "http://p:8080"}, "http://h/v1", URL("http://p:8080")),
        ({"HTTP_PROXY": "p:8080"}, "http://h/v1", URL("http://p:8080")),
        ({"HTTP_PROXY": "http://p:8080"}, "https://h/v1", None),
        ({"HTTPS_PROXY": "http://p:8080"}, "https://h/v1", URL("http://p:8080")),
        ({"HTTP_PROXY": "http://p", "NO_PROXY": "*"}, "http://h/v1", None),
        ({"HTTP_PROXY": "http://p", "NO_PROXY": "example.com"}, "http://api.example.com/v1", None),
        ({"HTTP_PROXY": "http://p", "NO_PROXY": "h:8000"}, "http://h:8000/v1", None),
        ({"HTTP_PROXY": "http://p", "NO_PROXY": "h:8000"}, "http://h:8001/v1", URL("http://p")),
        (
            {"HTTP_PROXY": "http://me:p%40ss@p:8080"},
            "http://h/v1",
            URL("http://me:p%40ss@p:8080"),
        ),
    ],
)
def test_each_form_of_proxy_variable_means_one_proxy(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str, proxy: URL | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(URL(url)) == proxy


def test_connections_are_kept_alive_by_the_system_while_a_model_thinks(run: Run) -> None:
    """C34: a gateway forgets a silent connection after some two minutes, and nobody would hear of it."""

    async def work() -> None:
        go_on = asyncio.Event()

        async def think(request: web.BaseRequest) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await go_on.wait()
            return response

        async with serving(think) as port, session() as client:
            response = await client.get(f"http://localhost:{port}/")
            assert response.connection is not None
            assert response.connection.transport is not None
            kept = response.connection.transport.get_extra_info("socket")
            with socket.socket(fileno=os.dup(kept.fileno())) as same:
                assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
                if hasattr(socket, "TCP_KEEPIDLE"):
                    assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
                    assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) <= 30
            go_on.set()
            await response.read()

    run(work())


def test_more_requests_than_aiohttps_own_hundred_are_open_at_once(run: Run) -> None:
    """C28, C29: the in-flight limit is the only one, and no request waits for a connection."""
    count = 130

    async def work() -> None:
        everyone, here = asyncio.Event(), 0

        async def meet(request: web.BaseRequest) -> web.Response:
            nonlocal here
            here += 1
            if here == count:
                everyone.set()
            await everyone.wait()
            return web.Response()

        async with serving(meet) as port, session(max_connections=count) as client:
            answers = await asyncio.gather(*(fetch(client, port) for _ in range(count)))
        assert [response.status for response in answers] == [200] * count

    run(work())
