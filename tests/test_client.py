"""ChatClient and one server that misbehaves: how often it asks, how long it waits, what it says at the end."""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from PIL import Image

from beam_llm.errors import ErrorKind
from beam_llm.records import Completion, FailedRequest, Outcome
from beam_llm.retry import RetryPolicy
from tests.asking import REPLY, Asking, error, failing, http, outcome, read_request, run, serve
from tests.endpoint import ScriptedEndpoint, answer, last_text


async def cut(request: web.Request) -> web.StreamResponse:
    """Reads the whole request and closes the connection without a word."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def hang(request: web.Request, _body: dict[str, Any] | None = None) -> web.StreamResponse:
    await asyncio.sleep(60)
    return answer()


def test_tries_are_counted_with_what_went_before() -> None:
    with failing(error(500), error(503)) as endpoint:
        got = outcome(endpoint)
    assert isinstance(got, Completion)
    assert (got.attempts, got.retried) == (3, (ErrorKind.SERVER_ERROR, ErrorKind.OVERLOADED))
    assert (got.answer, got.endpoint) == ("hello", endpoint.base_url)
    assert endpoint.requests == [endpoint.requests[0]] * 3


def test_retries_do_not_multiply() -> None:
    """C22: always 500, 20 rows, two retries: 60 requests."""

    async def broken(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return error(500)

    outcomes: list[Outcome] = []
    with ScriptedEndpoint(broken) as endpoint:

        async def work(ask: Asking) -> None:
            outcomes.extend(await ask.many(20))

        asking = run(lambda: Asking(endpoint.base_url, retry=RetryPolicy(2, 0.001, 0.002)), work)
    assert len(endpoint.requests) == asking.sent == len(asking.verdicts) == 60
    assert asking.tries(endpoint.base_url) == (60, 60)
    assert {(type(o), o.attempts, len(o.retried)) for o in outcomes} == {(FailedRequest, 3, 2)}


@pytest.mark.parametrize("status", [400, 401, 422])
def test_what_no_retry_can_mend_is_sent_once(status: int) -> None:
    with failing(error(status)) as endpoint:
        got = outcome(endpoint)
    assert isinstance(got, FailedRequest)
    no_key = "no key was sent, as $OPENAI_API_KEY is not set (--api_key_env names another variable): "
    words = f"{no_key if status == 401 else ''}status {status}"
    assert (got.attempts, got.status_code, got.message) == (1, status, words)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(("limit", "sends"), [(0, 1), (1, 2), (None, 4)])
def test_a_connection_lost_after_sending_has_a_kind_and_a_limit_of_its_own(limit: int | None, sends: int) -> None:
    """C21: every resend may be billed again."""
    retry = RetryPolicy(3, 0.001, 0.002, max_disconnect_retries=limit)
    with failing(*[cut] * 9) as endpoint:
        got = outcome(endpoint, retry=retry)
    assert isinstance(got, FailedRequest)
    assert (got.kind, got.attempts, len(endpoint.requests)) == (ErrorKind.DISCONNECTED, sends, sends)
    assert got.message.startswith("disconnected after the request was sent, before an answer came")


def test_other_failures_do_not_use_up_the_limit_of_lost_connections() -> None:
    retry = RetryPolicy(5, 0.001, 0.002, max_disconnect_retries=1)
    with failing(error(500), cut, error(500)) as endpoint:
        got = outcome(endpoint, retry=retry)
    assert isinstance(got, Completion)
    assert got.attempts == 4


@pytest.mark.parametrize(
    ("headers", "least_s", "most_s"),
    [
        ({"Retry_After": "0.4"}, 0.4, 1.0),
        ({"retry_after_ms": "250"}, 0.25, 0.8),
        ({"Retry_After": "0.4", "retry_after_ms": "250"}, 0.4, 1.0),
        ({"Retry_After": "1.2"}, 1.2, 1.9),
        ({"Retry_After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0, 0.4),
        ({"Retry_After": "soon"}, 0.0, 0.4),
    ],
)
def test_a_wait_is_never_shorter_than_told(headers: dict[str, str], least_s: float, most_s: float) -> None:
    """C23, C24: fractions, milliseconds, dates in the past, nonsense."""
    started = time.monotonic()
    with failing(error(429, **headers)) as endpoint:
        got = outcome(endpoint)
    assert isinstance(got, Completion)
    assert least_s <= time.monotonic() - started < most_s


@pytest.mark.parametrize("zone", ["GMT", ""])
def test_a_date_is_waited_for(zone: str) -> None:
    """C23."""
    until = int(time.time()) + 2
    header = email.utils.formatdate(until, usegmt=True).removesuffix("GMT").strip() + f" {zone}".rstrip()
    with failing(error(429, Retry_After=header)) as endpoint:
        got = outcome(endpoint)
    assert isinstance(got, Completion)
    assert until <= time.time() < until + 1


def test_a_read_timeout_says_what_it_waited_for_and_how_long() -> None:
    """C25."""
    with ScriptedEndpoint(hang) as endpoint:
        got = outcome(endpoint, read_timeout_s=0.2, retry=RetryPolicy(1, 0.001, 0.002))
    assert isinstance(got, FailedRequest)
    assert (got.kind, got.attempts, got.retried) == (ErrorKind.TIMEOUT, 2, (ErrorKind.TIMEOUT,))
    assert got.message == "read timeout: nothing was received within 0.2 s while waiting for the answer"
    assert got.latency_ms >= 200


def drip(pauses: int) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for _ in range(pauses):
            await response.write(b"\n ")
            await asyncio.sleep(0.05)
        await response.write(REPLY)
        return response

    return handle


def test_white_space_before_the_answer_is_no_fault() -> None:
    """C20."""
    with failing(drip(10)) as endpoint:
        got = outcome(endpoint, read_timeout_s=0.3)
    assert isinstance(got, Completion)
    assert (got.attempts, got.answer) == (1, "ok")


def test_white_space_for_ever_ends_at_the_total_limit() -> None:
    """C20: bytes keep coming, so the read timeout never fires."""
    with failing(drip(10_000)) as endpoint:
        got = outcome(endpoint, connect_timeout_s=0.1, read_timeout_s=0.2, retry=RetryPolicy(0))
    assert isinstance(got, FailedRequest)
    assert got.kind is ErrorKind.TIMEOUT
    assert got.message == "total timeout: not finished within 0.5 s, while waiting for the answer"


@pytest.mark.parametrize("settings", [{"max_in_flight": 4}, {"requests_per_minute": 1800}])
def test_waiting_for_a_turn_uses_up_no_timeout(settings: dict[str, Any]) -> None:
    """C28: the last of 50 rows starts after more than a second, by slots or by rate; each has 0.5 s."""

    async def slowly(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.1)
        return answer()

    started = time.monotonic()

    async def work(ask: Asking) -> None:
        for got in await ask.many(70 if "requests_per_minute" in settings else 50):
            assert isinstance(got, Completion), got
            assert got.attempts == 1

    with ScriptedEndpoint(slowly) as endpoint:
        run(lambda: Asking(endpoint.base_url, deadline_s=0.6, **settings), work)
    assert time.monotonic() - started > 1


def test_a_deadline_ends_a_try() -> None:
    started = time.monotonic()
    with ScriptedEndpoint(hang) as endpoint:
        got = outcome(endpoint, deadline_s=0.3)
    assert isinstance(got, FailedRequest)
    assert (got.kind, got.attempts) == (ErrorKind.DEADLINE, 1)
    assert got.message.startswith("deadline_s=0.3 was over: total timeout: not finished")
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("wait", ["0.9", "30"])
def test_a_deadline_ends_a_wait_and_the_last_failure_stays(wait: str) -> None:
    started = time.monotonic()
    with failing(*[error(429, Retry_After=wait) for _ in range(9)]) as endpoint:
        got = outcome(endpoint, deadline_s=0.3)
    assert isinstance(got, FailedRequest)
    assert (got.kind, got.attempts, got.retried, got.status_code) == (ErrorKind.RATE_LIMIT, 1, (), 429)
    assert time.monotonic() - started < 2


def test_an_idle_connection_closed_just_before_its_reuse_costs_no_row() -> None:
    """C31: the server closes every connection when a second request comes in, and does not read that one."""
    generated = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal generated
        await read_request(reader)
        generated += 1
        writer.write(http(REPLY))
        await reader.read(1)
        writer.close()

    async def main() -> list[Outcome]:
        server, url = await serve(connected)
        ask = Asking(url, retry=RetryPolicy(1, 0.001, 0.002))
        outcomes = [await ask(f"row {n}") for n in range(10)]
        await ask.client.close()
        server.close()
        return outcomes

    outcomes = asyncio.run(main())
    assert all(isinstance(o, Completion) for o in outcomes)
    assert sum(o.attempts for o in outcomes) == 19  # only the first row found no old connection
    assert generated == 10


@pytest.mark.parametrize("broken", [http(REPLY[:40], 500), http(REPLY, 500), REPLY[:0]])
def test_a_body_that_breaks_off_is_sent_for_again_and_never_read(broken: bytes) -> None:
    """C32: even if what came is a whole JSON object."""
    replies = [broken, http(REPLY)]

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(replies.pop(0))
        writer.close()

    async def main() -> Outcome:
        server, url = await serve(connected)
        ask = Asking(url)
        got = await ask()
        await ask.client.close()
        server.close()
        return got

    got = asyncio.run(main())
    assert isinstance(got, Completion)
    assert (got.attempts, got.retried) == (2, (ErrorKind.DISCONNECTED,))


def test_a_large_body_is_let_go_and_built_again_for_a_retry() -> None:
    text = "x" * 200_000
    with failing(error(500)) as endpoint:

        async def work(ask: Asking) -> None:
            assert isinstance(await ask(text), Completion)

        asking = run(lambda: Asking(endpoint.base_url), work)
    assert [last_text(body) == text for body in endpoint.requests] == [True, True]
    size = len(orjson.dumps(endpoint.requests[0]))
    assert [weight for weight, _ in itertools.groupby(asking.weights)] == [0, size, 0]


def test_a_body_that_cannot_be_built_again_fails_with_its_tries(tmp_path: Path) -> None:
    picture = tmp_path / "noise.png"
    Image.frombytes("RGB", (100, 100), random.Random(0).randbytes(30_000)).save(picture)

    async def remove(request: web.Request) -> web.StreamResponse:
        picture.unlink()
        return error(500)

    with failing(remove) as endpoint:
        got = outcome(endpoint, [{"type": "image", "value": str(picture)}])
    assert isinstance(got, FailedRequest)
    assert (got.kind, got.attempts, got.retried) == (ErrorKind.BAD_IMAGE, 1, (ErrorKind.SERVER_ERROR,))
