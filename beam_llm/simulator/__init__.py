"""An OpenAI-compatible endpoint with scripted latency and faults, as a process, a thread, or a command of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from aiohttp import web

from beam_llm.errors import BeamLLMError, ConfigError
from beam_llm.simulator.script import FAULTS, Script, is_doomed
from beam_llm.simulator.server import create_app

__all__ = ["FAULTS", "Script", "SimulatorProcess", "SimulatorThread", "create_app", "is_doomed"]

BACKLOG = 16384
"""Connections that may wait to be accepted; the kernel lowers it to net.core.somaxconn."""

KEEPALIVE_S = 3600.0
"""An idle connection stays open this long: a test decides when connections close, not the clock."""

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0

_HELP = """\
An OpenAI-compatible endpoint that answers every prompt with itself, for demos, tests and benchmarks.

It checks requests strictly (pictures are decoded to their last byte) and misbehaves as the script says:

  python -m beam_llm.simulator --port 8000 --script "latency_ms=200&error_rate=0.05&error_statuses=500,429"
  curl -s localhost:8000/stats

The port is the one line on standard output. GET /stats counts what came: requests, open, peak_open, by_status,
by_fault, distinct_prompts (different bodies), answered and distinct_answered (good answers sent, and to how many
different bodies: the gap is what was asked twice), bytes_in, connections. POST /reset zeroes that. A request may
bring keys of its own in the header x-simulate (all but api_key and seed)."""


async def serve(script: Script, host: str, port: int, started: Callable[[int], None], stop: asyncio.Event) -> None:
    """Serves until `stop` is set.

    Args:
        script: The behaviour.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        started: Called with the port once connections are accepted.
        stop: Ends the server; open requests are cut off.
    """
    raise_file_limit()
    runner = web.AppRunner(
        await create_app(script),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=0.1,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        started(runner.addresses[0][1])
        await stop.wait()
    finally:
        await runner.cleanup()


def raise_file_limit() -> None:
    """Raises this process's soft limit of open files to the hard one: each open request is a descriptor."""
    try:
        import resource
    except ImportError:  # not on Windows, where no such limit applies to sockets
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # "unlimited" can be more than the kernel grants
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Running:
    """Address and counts of a simulator that is up on this machine."""

    port = 0

    @property
    def base_url(self) -> str:
        """Base URL for clients, with `/v1`."""
        return f"http://127.0.0.1:{self.port}/v1"

    def stats(self) -> dict[str, Any]:
        """What the simulator has counted so far, as `GET /stats` tells it."""
        counts: dict[str, Any] = json.loads(self._ask("GET", "/stats"))
        return counts

    def reset(self) -> None:
        """Zeroes the counts and sets up the barrier of `hold_until` again."""
        self._ask("POST", "/reset")

    def _ask(self, method: str, path: str) -> bytes:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)  # unlike urllib, never by way of a proxy
        try:
            connection.request(method, path)
            return connection.getresponse().read()
        finally:
            connection.close()


class SimulatorProcess(_Running):
    """A simulator in a process of its own, for the time of a `with` block; it also ends when its parent dies.

    Args:
        script: The behaviour; None answers every good request at once.

    Raises:
        BeamLLMError: On entering, if the process does not come up.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None when it does not run."""
        return self._process.pid if self._process else None

    def __enter__(self) -> SimulatorProcess:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        command = (sys.executable, "-m", "beam_llm.simulator", "--exit_with_stdin", "--script", self.script.as_query())
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C at the terminal stops the client, which then stops the simulator
        )
        try:
            self.port = self._read_port(self._process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _read_port(self, process: subprocess.Popen[bytes]) -> int:
        if process.stdout is None or not select.select([process.stdout], [], [], START_TIMEOUT_S)[0]:
            raise BeamLLMError(f"the simulator did not start within {START_TIMEOUT_S:g} s")
        line = process.stdout.readline()
        if not line:
            raise BeamLLMError(f"the simulator ended with exit code {process.wait()} before it was up")
        return int(line)

    def __exit__(self, *exc: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with process:  # closes the pipes and waits; the end of its standard input is what stops it
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


class SimulatorThread(_Running):
    """A simulator in a thread of this process, with a loop of its own, for the time of a `with` block.

    Args:
        script: The behaviour; None answers every good request at once.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._up = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> SimulatorThread:
        self._thread = threading.Thread(target=self._run, name="simulator", daemon=True)
        self._thread.start()
        self._up.wait()
        if self._error is not None:
            raise BeamLLMError(f"the simulator did not start: {self._error}") from self._error
        return self

    def _run(self) -> None:
        loop = _new_loop()
        try:
            loop.run_until_complete(self._serve(loop))
        except BaseException as error:  # handed to the thread that waits in __enter__
            self._error = error
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
            self._up.set()

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        stop = asyncio.Event()
        self._loop, self._stop = loop, stop
        await serve(self.script, "127.0.0.1", 0, self._started, stop)

    def _started(self, port: int) -> None:
        self.port = port
        self._up.set()

    def __exit__(self, *exc: object) -> None:
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _announce(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


async def _serve_until_told(args: argparse.Namespace, script: Script) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if args.exit_with_stdin:
        threading.Thread(target=_wait_for_end_of_input, args=(loop, stop), daemon=True).start()
    await serve(script, args.host, args.port, _announce, stop)


def _wait_for_end_of_input(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """The parent holds the other end of standard input: it ends when the parent closes it or dies, however it dies."""
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):  # the loop is closed already
        loop.call_soon_threadsafe(stop.set)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, or 2 for a script that cannot work."""
    keys = textwrap.dedent((Script.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0])
    parser = argparse.ArgumentParser(
        "python -m beam_llm.simulator",
        description=_HELP,
        epilog=f"keys of a script:\n{textwrap.indent(keys, '  ')}\n\nfaults: {', '.join(FAULTS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0, the default, takes a free one")
    parser.add_argument("--script", default="", help="the behaviour, as key=value pairs joined by &")
    parser.add_argument("--exit_with_stdin", action="store_true", help="stop when standard input ends")
    args = parser.parse_args(argv)
    try:
        script = Script.from_query(args.script)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    loop = _new_loop()
    try:
        loop.run_until_complete(_serve_until_told(args, script))
    finally:
        loop.close()
    return 0
