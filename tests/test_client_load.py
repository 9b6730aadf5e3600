"""ChatClient, several endpoints and overload: where requests go, how many are open, what holds them back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web

from beam_llm.records import Completion
from beam_llm.retry import RetryPolicy
from tests.asking import REPLY, Asking, error, failing, free_port, http, read_request, run, serve
from tests.endpoint import ScriptedEndpoint, answer, echo


def test_retry_after_holds_back_every_request_and_counts_as_throttled() -> None:
    arrived: list[float] = []

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        arrived.append(time.monotonic())
        return error(503, Retry_After="1.1") if len(arrived) == 1 else answer()

    async def work(ask: Asking) -> None:
        first = asyncio.create_task(ask())
        await ask.judged_once.wait()
        assert ask.limit.open == 0
        assert all(isinstance(o, Completion) and o.attempts == 1 for o in await ask.many(30))
        assert isinstance(await first, Completion)

    with ScriptedEndpoint(handle) as endpoint:
        asking = run(lambda: Asking(endpoint.base_url), work)
    assert len(arrived) == 32
    assert min(arrived[1:]) - arrived[0] >= 1.1
    assert asking.limit.throttle.take_seconds() == 1


def test_a_pause_of_one_endpoint_sends_its_requests_to_another_at_once() -> None:
    started = time.monotonic()
    with failing(error(429, Retry_After="30")) as paused, ScriptedEndpoint(echo) as other:

        async def work(ask: Asking) -> None:
            assert all(isinstance(o, Completion) for o in await ask.many(20))
            assert ask.tries(paused.base_url)[1] == 1

        run(lambda: Asking(paused.base_url, other.base_url, max_in_flight=1), work)
    assert time.monotonic() - started < 5
    assert (len(paused.requests), len(other.requests)) == (1, 20)


def test_one_that_is_cancelled_during_a_pause_gives_everything_back() -> None:
    async def work(ask: Asking) -> None:
        tasks = [asyncio.create_task(ask()) for _ in range(3)]
        await ask.judged_once.wait()
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        assert await asyncio.gather(*tasks, return_exceptions=True)
        assert ask.limit.open == 0

    with failing(*[error(429, Retry_After="30") for _ in range(3)]) as endpoint:
        run(lambda: Asking(endpoint.base_url), work)


def test_one_dead_replica_of_three_costs_no_row_and_few_tries() -> None:
    dead = f"http://127.0.0.1:{free_port()}/v1"
    with ScriptedEndpoint(echo) as one, ScriptedEndpoint(echo) as two:

        async def work(ask: Asking) -> None:
            outcomes = await ask.many(600)
            assert all(isinstance(o, Completion) and o.endpoint != dead for o in outcomes)
            assert max(o.attempts for o in outcomes) == 2

        asking = run(lambda: Asking(one.base_url, dead, two.base_url, retry=RetryPolicy(1, 0.001, 0.002)), work)
    requests, failures = asking.tries(dead)
    assert 5 <= requests == failures <= 40
    assert min(len(one.requests), len(two.requests)) > 200


def test_a_retry_goes_to_another_endpoint_than_the_one_that_refused_it() -> None:
    """A plain 429 is no reason to leave the endpoint out; one retry must do all the same."""

    async def refuse(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return error(429)

    with ScriptedEndpoint(refuse) as refusing, ScriptedEndpoint(echo) as other:

        async def work(ask: Asking) -> None:
            assert all(isinstance(o, Completion) for o in await ask.many(100))
            assert ask.tries(refusing.base_url)[0] > 10

        run(lambda: Asking(refusing.base_url, other.base_url, retry=RetryPolicy(1, 0.001, 0.002)), work)


def test_an_endpoint_that_returns_gets_its_traffic_back() -> None:
    """It is out of reach at first; rows wait without using up their tries, all but the few that find it out."""
    port, url = free_port(), ""
    arrived = 0
    all_arrived = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        while True:
            try:
                await read_request(reader)
            except asyncio.IncompleteReadError:
                writer.close()
                return
            arrived += 1
            if arrived == 3:
                all_arrived.set()
            await all_arrived.wait()  # the first of them is the probe: the others come before it is answered
            writer.write(http(REPLY))

    async def main() -> Asking:
        ask = Asking(url, max_in_flight=5)
        rows = asyncio.create_task(ask.many(50))
        await asyncio.sleep(0.7)
        assert ask.sent < 20
        server, _ = await serve(connected, port)
        outcomes = await asyncio.wait_for(rows, 10)
        await ask.client.close()
        server.close()
        assert all(isinstance(o, Completion) for o in outcomes)
        return ask

    url = f"http://127.0.0.1:{port}/v1"
    asking = asyncio.run(main())
    assert asking.sent < 70
    assert asking.limit.maximum > 1


def test_overload_lowers_the_open_requests_and_they_grow_back() -> None:
    """Seconds of the client's clock pass thirty times as fast: a look at the share takes 33 ms."""
    overloaded, done = True, False

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.01)
        return error(503) if overloaded else answer()

    with ScriptedEndpoint(handle) as endpoint:

        async def until_open(wanted: range) -> None:
            while True:
                endpoint.peak = 0
                await asyncio.sleep(0.1)
                if endpoint.peak in wanted:
                    return

        async def rows(ask: Asking) -> None:
            while not done:
                assert isinstance(await ask(), Completion)

        async def work(ask: Asking) -> None:
            nonlocal overloaded, done
            tasks = [asyncio.create_task(rows(ask)) for _ in range(200)]
            await until_open(range(1, 4))
            overloaded = False
            await until_open(range(8, 33))
            await until_open(range(60, 65))
            done = True
            await asyncio.gather(*tasks)
            assert ask.limit.peak == 64

        patient = RetryPolicy(10_000, 0.01, 0.05)
        asking = run(lambda: Asking(endpoint.base_url, retry=patient, clock=lambda: 30 * time.monotonic()), work)
    assert asking.limit.maximum >= 60  # a last refusal may have cut it by one


def test_tokens_that_were_not_used_are_given_back_to_the_rate() -> None:
    """1,000 tokens a second; each row may take 1,000 and takes 5: by the estimates alone ten rows last 9 s."""

    async def work(ask: Asking) -> None:
        for _ in range(10):
            assert isinstance(await ask("hello", max_tokens=1000), Completion)

    started = time.monotonic()
    with ScriptedEndpoint(echo) as endpoint:
        run(lambda: Asking(endpoint.base_url, tokens_per_minute=60_000), work)
    assert time.monotonic() - started < 2


def test_tokens_per_minute_hold_requests_back() -> None:
    """1,000 tokens a second, a second's worth at once; four rows of about 410, none of which is settled in time."""
    arrived: list[float] = []

    async def slowly(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        arrived.append(time.monotonic())
        await asyncio.sleep(1)
        return answer()

    async def work(ask: Asking) -> None:
        await asyncio.gather(*(ask("hello", max_tokens=400) for _ in range(4)))

    with ScriptedEndpoint(slowly) as endpoint:
        run(lambda: Asking(endpoint.base_url, tokens_per_minute=60_000), work)
    assert arrived[1] - arrived[0] < 0.2
    assert 0.55 <= arrived[3] - arrived[0] < 1
