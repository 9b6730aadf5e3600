"""llmock judges the client: it keeps limits as providers do, sees every try, and says what a client did wrong.

Its errors are `retry_after_ignored`, `retried_non_retryable` and `retry_storm` (over ten tries of one request), its
warnings `no_backoff` (waits that do not grow) and `gave_up`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from urllib.request import Request, urlopen

import pytest

from beam_llm.config import ChatConfig
from beam_llm.driver import Driver
from beam_llm.records import Completion, FailedRequest, Outcome
from beam_llm.retry import RetryPolicy
from tests.servers import free_port
from tests.test_driver import drain, prepare

pytestmark = pytest.mark.skipif(find_spec("llmock") is None, reason="llmock is not installed: pip install llmock")

_START = "from llmock.cli import app; app()"


class LLMock:
    """A running llmock.

    Args:
        url: Without `/v1`.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> Any:
        """The JSON of a path of its control API."""
        with urlopen(f"{self.url}/_llmock/{path}", timeout=10) as response:  # noqa: S310 - its own server
            return json.load(response)

    def script(self, *behaviors: dict[str, Any]) -> None:
        """Has the next requests misbehave."""
        data = json.dumps({"behaviors": behaviors}).encode()
        urlopen(Request(f"{self.url}/_llmock/scenario", data), timeout=10).close()  # noqa: S310 - its own server


@contextmanager
def llmock(*flags: str) -> Iterator[LLMock]:
    """An llmock of its own, which repeats what it is told."""
    port = free_port()
    command = [sys.executable, "-c", _START, "serve", "--port", str(port), "--log-level", "error"]
    with subprocess.Popen([*command, "--response-style", "echo", *flags], stdout=subprocess.DEVNULL) as process:
        try:
            server = LLMock(f"http://127.0.0.1:{port}")
            give_up_s = time.monotonic() + 20
            while True:
                try:
                    server.get("verdict")
                    break
                except OSError:
                    assert process.poll() is None, "llmock has ended"
                    assert time.monotonic() < give_up_s, "llmock does not answer"
                    time.sleep(0.05)
            yield server
        finally:
            process.kill()


def ask(server: LLMock, texts: Sequence[str], **settings: Any) -> dict[str, Outcome]:
    """The outcome of each text."""
    config = ChatConfig((f"{server.url}/v1",), model="gpt-4o-mini", max_in_flight=32, **settings)
    driver = Driver(config)
    try:
        channel = driver.channel()
        channel.submit(prepare(config, list(texts)))
        return dict(drain(channel))
    finally:
        driver.close()


@pytest.mark.timeout(60)
def test_a_rate_limit_is_kept_to_the_letter_and_every_row_is_answered() -> None:
    """360 requests at once and then 6 a second are allowed; 380 rows want in, 32 at a time, and know of no limit."""
    texts = [f"row {n}" for n in range(380)]
    with llmock("--rpm", "360", "--tpm", "90000") as server:
        outcomes = ask(server, texts)
        verdict = server.get("verdict")
        requests = server.get("requests")["requests"]
    answers = {text: o.answer for text, o in outcomes.items() if isinstance(o, Completion)}
    assert answers == {text: f"Hello! You said: {text}" for text in texts}
    assert (verdict["passed"], verdict["findings"], verdict["calls"]) == (True, [], len(texts))
    refused = [request for request in requests if request["status"] == 429]
    assert len(refused) >= 5, "the limit was never reached"
    assert all(request["retry_after"] > 0 for request in refused)


def test_what_passes_is_tried_again_and_what_does_not_is_sent_once() -> None:
    """Each status so many times. Full jitter may draw a shorter wait after a longer one, of which llmock warns."""
    passing = {500: 20, 503: 20, 529: 5, 408: 5, 409: 5, 502: 5, 504: 5}
    permanent = {400: 20, 422: 10, 403: 5, 404: 5, 413: 5}
    texts = [f"row {n}" for n in range(200)]
    with llmock() as server:
        server.script({"type": "fail", "status": 429, "times": 20, "retry_after": 0.5})
        for status, times in (passing | permanent).items():
            server.script({"type": "fail", "status": status, "times": times})
        outcomes = ask(server, texts, retry=RetryPolicy(9, 0.1, 1.0))
        verdict = server.get("verdict")
    failed = Counter(o.status_code for o in outcomes.values() if isinstance(o, FailedRequest))
    assert failed == permanent
    assert verdict["attempts"] == len(texts) + 20 + sum(passing.values())
    assert {finding["code"] for finding in verdict["findings"]} <= {"no_backoff"}
    assert verdict["passed"]
