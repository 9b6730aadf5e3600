from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from beam_llm.body import BodyBuilder, PreparedRequest
from beam_llm.channel import Channel
from beam_llm.config import ChatConfig
from beam_llm.driver import Driver
from beam_llm.errors import ErrorKind, RunStoppedError
from beam_llm.process_drivers import acquire_driver, release_driver
from beam_llm.records import ChatRequest, Completion, FailedRequest, Outcome
from beam_llm.retry import RetryPolicy
from tests.endpoint import ScriptedEndpoint, answer, echo, last_text

QUICK = RetryPolicy(max_retries=3, initial_backoff_s=0.001, max_backoff_s=0.002)


def config(endpoint: ScriptedEndpoint, **settings: Any) -> ChatConfig:
    return ChatConfig(base_urls=(endpoint.base_url,), model="m", retry=settings.pop("retry", QUICK), **settings)


def prepare(config: ChatConfig, texts: list[str]) -> list[tuple[str, PreparedRequest]]:
    builder = BodyBuilder(config)
    prepared = []
    for text in texts:
        one = builder.prepare(ChatRequest(text, {"messages": text}))
        assert isinstance(one, PreparedRequest)
        prepared.append((text, one))
    return prepared


def drain(channel: Channel) -> Iterator[tuple[str, Outcome]]:
    yield from channel.poll()
    while channel.pending:
        yield from channel.wait(for_room=False)


@pytest.fixture
def echoing() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(echo) as endpoint:
        yield endpoint


def test_every_request_comes_back_once_with_its_own_answer(echoing: ScriptedEndpoint) -> None:
    settings = config(echoing, max_in_flight=50)
    driver = Driver(settings)
    channel = driver.channel()
    channel.submit(prepare(settings, [f"row {i}" for i in range(500)]))
    outcomes = dict(drain(channel))
    driver.close()
    assert len(outcomes) == 500
    assert all(isinstance(o, Completion) and o.answer == token for token, o in outcomes.items())


def test_a_slow_request_delays_no_other_and_the_window_stays_full() -> None:
    """4 s for one, 0.1 s for 1,000 others, 50 open: a wait at every batch's edge would take 4 s more."""

    async def one_is_slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(4 if last_text(body) == "slow" else 0.1)
        return answer("ok")

    with ScriptedEndpoint(one_is_slow) as endpoint:
        settings = config(endpoint, max_in_flight=50)
        driver = Driver(settings)
        channel = driver.channel()
        channel.submit(prepare(settings, ["slow", *(f"row {i}" for i in range(1000))]))
        order = [token for token, _ in drain(channel)]
        driver.close()
    assert order[-1] == "slow", "others were still open when the slow one was answered"
    assert endpoint.peak == 50


def test_open_requests_never_exceed_the_limit_of_the_process_however_many_bundles_run() -> None:
    """C63: 20 bundles at once in one process share 50 slots, one session, and get their own outcomes."""

    async def slowly(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.02)
        return answer(last_text(body))

    with ScriptedEndpoint(slowly) as endpoint:
        settings = config(endpoint, max_in_flight=50)
        results: dict[int, list[str]] = {}

        def bundle(number: int) -> None:
            driver = acquire_driver(settings)
            channel = driver.channel()
            channel.submit(prepare(settings, [f"{number} {i}" for i in range(40)]))
            results[number] = [token for token, _ in drain(channel)]
            release_driver(driver)

        threads = [threading.Thread(target=bundle, args=(n,)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert endpoint.peak <= 50
    assert {n: sorted(tokens) for n, tokens in results.items()} == {
        n: sorted(f"{n} {i}" for i in range(40)) for n in range(20)
    }


def test_submitting_reports_no_room_until_slots_are_free() -> None:
    released = threading.Event()

    async def hold(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.to_thread(released.wait)
        return answer("ok")

    with ScriptedEndpoint(hold) as endpoint:
        settings = config(endpoint, max_in_flight=4, batch_size=8)
        driver = Driver(settings)
        channel = driver.channel()
        channel.submit(prepare(settings, [str(i) for i in range(20)]))
        full = channel.has_room()
        released.set()
        finished = []
        while not channel.has_room():
            finished += channel.wait(for_room=True)
        finished += drain(channel)
        driver.close()
    assert not full
    assert len(finished) == 20


def test_unsent_bytes_limit_what_is_taken_in(echoing: ScriptedEndpoint) -> None:
    settings = config(echoing, max_in_flight_mb=1, batch_size=1000)
    driver = Driver(settings)
    channel = driver.channel()
    channel.submit(prepare(settings, ["x" * 200_000 + str(i) for i in range(20)]))
    finished = []
    while not channel.has_room():
        assert driver.unsent_bytes <= 20 * 210_000
        finished += channel.wait(for_room=True)
    finished += drain(channel)
    left = driver.unsent_bytes
    driver.close()
    assert len(finished) == 20
    assert left == 0


def test_a_request_that_waits_to_try_again_holds_no_slot() -> None:
    """One row is told to wait 0.5 s; with one slot, the others are answered meanwhile."""
    refused: list[str] = []

    async def once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if last_text(body) == "later" and not refused:
            refused.append("later")
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers={"Retry-After": "0.5"})
        return answer("ok")

    with ScriptedEndpoint(once) as endpoint:
        settings = config(endpoint, max_in_flight=1)
        driver = Driver(settings)
        channel = driver.channel()
        channel.submit(prepare(settings, ["later", *(f"row {i}" for i in range(20))]))
        order = [(token, outcome) for token, outcome in drain(channel)]
        driver.close()
    assert order[-1][0] == "later"
    outcome = order[-1][1]
    assert isinstance(outcome, Completion)
    assert (outcome.attempts, outcome.retried) == (2, (ErrorKind.RATE_LIMIT,))


def test_a_refused_key_stops_the_run_within_tens_of_requests() -> None:
    """C19: 401 for all of 10,000 rows."""

    async def refuse(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "Incorrect API key", "code": "invalid_api_key"}}, status=401)

    with ScriptedEndpoint(refuse) as endpoint:
        settings = config(endpoint, max_in_flight=1024)
        driver = Driver(settings)
        channel = driver.channel()
        channel.submit(prepare(settings, [str(i) for i in range(10_000)]))
        with pytest.raises(RunStoppedError, match="Incorrect API key"):
            list(drain(channel))
        driver.close()
    assert len(endpoint.requests) < 60


def test_some_refusals_among_answers_never_stop_the_run() -> None:
    async def refuse_some(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if int(last_text(body)) % 3 == 0:
            return web.json_response({"error": {"message": "not for you"}}, status=403)
        return answer("ok")

    with ScriptedEndpoint(refuse_some) as endpoint:
        settings = config(endpoint, max_in_flight=64)
        driver = Driver(settings)
        channel = driver.channel()
        channel.submit(prepare(settings, [str(i) for i in range(600)]))
        outcomes = dict(drain(channel))
        driver.close()
    failed = {token for token, outcome in outcomes.items() if isinstance(outcome, FailedRequest)}
    assert failed == {str(i) for i in range(0, 600, 3)}


def test_abandoned_requests_are_dropped_and_their_slots_come_back() -> None:
    async def hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if last_text(body).startswith("old"):
            await asyncio.sleep(60)
        return answer("ok")

    with ScriptedEndpoint(hang) as endpoint:
        settings = config(endpoint, max_in_flight=4)
        driver = Driver(settings)
        old = driver.channel()
        old.submit(prepare(settings, [f"old {i}" for i in range(40)]))
        deadline = time.monotonic() + 5
        while endpoint.open < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        old.abandon()
        new = driver.channel()
        new.submit(prepare(settings, [f"new {i}" for i in range(8)]))
        outcomes = dict(drain(new))
        left = driver.unsent_bytes
        driver.close()
    assert sorted(outcomes) == sorted(f"new {i}" for i in range(8))
    assert old.poll() == []
    assert left == 0


def test_closing_with_open_requests_is_quick_and_leaves_no_thread(recwarn: pytest.WarningsRecorder) -> None:
    """C92: no unclosed session, no pending task."""

    async def hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(60)
        return answer("ok")

    others = set(threading.enumerate())
    with ScriptedEndpoint(hang) as endpoint:
        settings = config(endpoint)
        driver = acquire_driver(settings)
        assert acquire_driver(settings) is driver
        channel = driver.channel()
        channel.submit(prepare(settings, ["a", "b"]))
        release_driver(driver)
        assert any(t.name == "beam_llm-loop" for t in set(threading.enumerate()) - others)
        started = time.monotonic()
        release_driver(driver)
    assert time.monotonic() - started < 2
    assert not any(t.name == "beam_llm-loop" for t in set(threading.enumerate()) - others)
    assert [str(w.message) for w in recwarn] == []
