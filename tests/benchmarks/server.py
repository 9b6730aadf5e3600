"""The server of all measures: nginx with Lua, which scripts latency, counts, and costs next to nothing itself."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from tests.benchmarks.tools import nginx_modules

_CONFIG = """
%(modules)s
daemon off; master_process off; pid nginx.pid; error_log error.log warn;
worker_rlimit_nofile %(descriptors)d;
events { worker_connections %(descriptors)d; multi_accept on; }
http {
  access_log off; default_type application/json; keepalive_timeout 120s; keepalive_requests 100000000;
  client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3; uwsgi_temp_path t4; scgi_temp_path t5;
  client_max_body_size 64m; client_body_buffer_size 64k; client_body_in_single_buffer on;
  init_by_lua_block {
    local answer = '{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
      .. '{"role":"assistant","content":"Paris."},"finish_reason":"stop"}],'
      .. '"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}}'
    local counts
    local chat = {}
    function chat.reset()
      counts = {now = 0, peak = 0, requests = 0, answers = 0, body_bytes = 0,
                first_s = 0, peak_s = 0, first_answer_s = 0, last_answer_s = 0}
    end
    function chat.counts()
      local fields = {}
      for name, value in pairs(counts) do fields[#fields + 1] = string.format('"%%s":%%.3f', name, value) end
      return "{" .. table.concat(fields, ",") .. "}"
    end
    function chat.serve(latency_ms)
      local mine, now_s = counts, ngx.now()
      if mine.requests == 0 then mine.first_s = now_s end
      mine.requests = mine.requests + 1
      mine.body_bytes = mine.body_bytes + (tonumber(ngx.var.http_content_length) or 0)
      mine.now = mine.now + 1
      if mine.now > mine.peak then mine.peak = mine.now; mine.peak_s = now_s end
      if latency_ms > 0 then ngx.sleep(latency_ms / 1000) end
      mine.now = mine.now - 1
      mine.last_answer_s = ngx.now()
      if mine.answers == 0 then mine.first_answer_s = mine.last_answer_s end
      mine.answers = mine.answers + 1
      ngx.header.content_length = #answer
      ngx.print(answer)
    end
    chat.reset()
    package.loaded.chat = chat
  }
  server {
    listen 127.0.0.1:%(port)d backlog=16384;
    location = /v1/chat/completions { content_by_lua_block { ngx.req.discard_body() require("chat").serve(0) } }
    location ~ ^/latency/(?<ms>[0-9]+)/v1/chat/completions$ {
      content_by_lua_block { ngx.req.discard_body() require("chat").serve(tonumber(ngx.var.ms)) }
    }
    location = /scripted/v1/chat/completions {
      content_by_lua_block {
        ngx.req.read_body()
        require("chat").serve(tonumber(ngx.req.get_body_data():match('latency_ms=(%%d+)')))
      }
    }
    location = /v1/models { return 200 '{"object":"list","data":[{"id":"m","object":"model"}]}'; }
    location = /counts { content_by_lua_block { ngx.print(require("chat").counts()) } }
    location = /reset { content_by_lua_block { require("chat").reset() ngx.print("{}") } }
  }
}
"""
_DESCRIPTORS = 19_000
"""Connections that it can hold; below the hard limit of open files that containers commonly have."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What the server has seen since `reset`. Times are seconds since the epoch, 0 where there was none.

    Args:
        now, peak: Open requests; a request is open from its headers to its answer.
        requests, answers: How many came and went.
        body_bytes: Of all requests' bodies.
        first_s: First request.
        peak_s: When the peak was first reached.
        first_answer_s, last_answer_s: When answers left.
    """

    now: float
    peak: float
    requests: float
    answers: float
    body_bytes: float
    first_s: float
    peak_s: float
    first_answer_s: float
    last_answer_s: float


@dataclass(frozen=True, slots=True)
class Server:
    """A running nginx. `latency_url` gives every answer the same latency; `scripted_url` reads it from the request.

    A request to `scripted_url` says `latency_ms=123` anywhere in its body, which must be short.
    """

    root: str

    @property
    def base_url(self) -> str:
        """Answers at once."""
        return f"{self.root}/v1"

    @property
    def scripted_url(self) -> str:
        """Answers after the latency that the request's body names."""
        return f"{self.root}/scripted/v1"

    def latency_url(self, latency_ms: int) -> str:
        """Answers after `latency_ms`."""
        return f"{self.root}/latency/{latency_ms}/v1"

    def counts(self) -> Counts:
        """What it has seen since `reset`."""
        return Counts(**self._get("counts"))

    def reset(self) -> None:
        """Starts counting anew."""
        self._get("reset")

    def _get(self, name: str) -> dict[str, float]:
        with urlopen(f"{self.root}/{name}", timeout=30) as response:  # noqa: S310 - our own loopback server
            found: dict[str, float] = json.load(response)
        return found


@contextlib.contextmanager
def running_server() -> Iterator[Server]:
    """A server on a free port, as long as the `with` block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="benchmark-nginx-") as folder:
        modules = "\n".join(f"load_module {path};" for path in nginx_modules())
        settings = {"modules": modules, "descriptors": _DESCRIPTORS, "port": port}
        Path(folder, "nginx.conf").write_text(_CONFIG % settings)
        command = ["nginx", "-p", folder, "-c", "nginx.conf", "-e", "error.log"]
        with Path(folder, "out").open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            server = Server(f"http://127.0.0.1:{port}")
            _wait_until_up(server, process, folder)
            yield server
        finally:
            process.terminate()
            process.wait()


def _wait_until_up(server: Server, process: subprocess.Popen[bytes], folder: str) -> None:
    give_up_s = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < give_up_s:
        with contextlib.suppress(OSError):
            server.reset()
            return
        time.sleep(0.02)
    said = "".join(Path(folder, name).read_text() for name in ("out", "error.log") if Path(folder, name).exists())
    raise RuntimeError(f"nginx did not start: {said}")
