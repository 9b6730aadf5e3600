"""llama.cpp's own OpenAI-compatible server, run as a process of its own on a tiny model: what the tests talk to.

The server comes in the `xllamacpp` wheel, the model from `tiny_model`, so nothing is downloaded when a test runs.
"""

from __future__ import annotations

import http.client
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

REQUIREMENTS = ("xllamacpp", "gguf", "numpy")
"""Modules that the server's process imports; this one imports none of them."""

MODEL = "tiny"
"""The model's name. The server answers with it, and takes any other just as well."""

PROJECT_ROOT = Path(__file__).resolve().parents[2]

# It starts in 0.3 s; a machine busy with other tests can take far longer.
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02

SLOTS = 8
# The server divides its context among the slots. The tiny model has a token for each letter of most words, so a
# prompt of a page, a picture (16 tokens) and an answer need about this much.
TOKENS_PER_SLOT = 4096
# A keep-alive connection occupies a thread. With the default pool 64 clients starve each other (p99 13 s).
HTTP_THREADS = 600


class LlamaServerError(RuntimeError):
    """The server could not be started; ends with the last lines of its log."""


class LlamaServer:
    """A running server; a context manager.

    Answers are random letters that run to `max_tokens` and finish with `length`; with a `json_schema` they are valid
    JSON and finish with `stop`. Always send `max_tokens`: without it an answer runs to the end of the context.

    Args:
        api_keys: Keys that the server accepts as bearer tokens, any other gets a 401. None: all are let in.
    """

    def __init__(self, api_keys: Sequence[str] = ()) -> None:
        self._api_keys = tuple(api_keys)
        self._address = ""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[str] | None = None

    @property
    def base_url(self) -> str:
        """Base URL with `/v1`, as the `--base_url` flag takes it."""
        return f"{self._address}/v1"

    @property
    def returncode(self) -> int | None:
        """Exit code of the server's process; None while it runs."""
        return self._process.poll() if self._process else None

    def __enter__(self) -> LlamaServer:
        self._folder = tempfile.TemporaryDirectory(prefix="llama-server-")
        folder = Path(self._folder.name)
        command = [sys.executable, "-m", "tests.integration.llama_server", str(folder), *self._api_keys]
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=PROJECT_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            self._address = _read_address(self._process, deadline)
            _wait_until_healthy(self._address, deadline)
        except BaseException as error:
            log_lines = (folder / "log").read_text(errors="replace").splitlines()
            self._stop()
            if isinstance(error, LlamaServerError):
                raise LlamaServerError("\n".join([str(error), *log_lines[-20:]])) from None
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        process, folder = self._process, self._folder
        if process is None or folder is None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()
        folder.cleanup()


def _read_address(process: subprocess.Popen[str], deadline: float) -> str:
    """The line that the process prints when its model is loaded: `http://127.0.0.1:PORT`."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
    if not readable:
        raise LlamaServerError(f"llama.cpp's server did not start within {START_TIMEOUT_S:g} s; its log:")
    if not (address := process.stdout.readline().strip()):
        raise LlamaServerError(f"llama.cpp's server ended with exit code {process.wait(STOP_TIMEOUT_S)}; its log:")
    return address


def _wait_until_healthy(address: str, deadline: float) -> None:
    status: int | OSError = 0
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=5.0)
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
        except OSError as error:
            status = error
        finally:
            connection.close()
        if status == 200:
            return
        time.sleep(POLL_S)
    raise LlamaServerError(f"llama.cpp's server at {address} never became healthy, last {status!r}; its log:")


def serve(folder: Path, api_keys: Sequence[str]) -> NoReturn:
    """Make the model, serve it, print the address; the process ends on SIGTERM or when its parent is gone.

    Args:
        folder: Where the model's files go.
        api_keys: Keys to accept; empty: no key is asked for.
    """
    import xllamacpp

    from tests.integration.tiny_model import make_tiny_model

    model = make_tiny_model(folder)
    params = xllamacpp.CommonParams()
    params.port = 0  # the system chooses a free one
    params.model.path = str(model.language)
    params.mmproj.path = str(model.vision)
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * TOKENS_PER_SLOT
    params.n_threads_http = HTTP_THREADS
    params.warmup = False
    params.api_keys = list(api_keys)
    params.model_alias = {MODEL}
    server = xllamacpp.Server(params)
    # Not sys.exit: the server's destructor waits for every answer under way, and there is nothing to save.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()  # ends with the parent, however that ended
    os._exit(0)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2:])
