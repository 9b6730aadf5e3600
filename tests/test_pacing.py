"""Requests and tokens per minute, and the line in which requests wait for their turn."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_llm.limits import Throttle
from beam_llm.pacing import ANSWER_TOKENS, TOKENS_PER_IMAGE, Pacer, RateLimit, estimate_tokens

NOW_S = 1_000_000.0


def test_no_rate_means_no_wait() -> None:
    limit = RateLimit(None)
    assert {limit.reserve(NOW_S) for _ in range(1000)} == {0.0}


def test_starts_are_spread_evenly_once_the_burst_is_gone() -> None:
    limit = RateLimit(600)  # every 0.1 s, ten saved up
    waits = [limit.reserve(NOW_S) for _ in range(13)]
    assert waits[:10] == [0.0] * 10
    assert waits[10:] == pytest.approx([0.1, 0.2, 0.3], abs=1e-6)


def test_idle_time_saves_up_no_more_than_the_burst() -> None:
    limit = RateLimit(600, burst_s=0.5)
    for now_s in (NOW_S, NOW_S + 3600):
        assert [limit.reserve(now_s) == 0 for _ in range(7)] == [True] * 5 + [False] * 2


def test_a_slow_rate_still_lets_one_start_at_once() -> None:
    limit = RateLimit(0.5)  # one every two minutes
    assert limit.reserve(NOW_S) == 0
    assert limit.reserve(NOW_S) == pytest.approx(120)
    assert limit.reserve(NOW_S + 240) == pytest.approx(0)


@given(st.lists(st.floats(0, 30), min_size=1, max_size=80), st.floats(1, 10_000))
def test_no_minute_sees_more_starts_than_the_rate_and_the_burst(gaps: list[float], per_minute: float) -> None:
    limit, now_s, starts = RateLimit(per_minute), NOW_S, []
    for gap in gaps:
        now_s += gap
        starts.append(now_s + limit.reserve(now_s))
    allowed = per_minute + max(1.0, per_minute / 60) + 1
    for first in starts:
        assert sum(first <= start < first + 60 for start in starts) <= allowed


def test_starts_that_use_up_more_are_further_apart() -> None:
    limit = RateLimit(60_000)  # 1,000 tokens a second
    waits = [limit.reserve(NOW_S, tokens) for tokens in (500, 500, 3000, 100, 100)]
    assert waits == pytest.approx([0, 0, 0.5, 3.5, 3.6], abs=1e-6)


def test_a_start_larger_than_the_burst_goes_at_once_when_nothing_is_owed() -> None:
    limit = RateLimit(60_000)
    assert limit.reserve(NOW_S, 30_000) == 0
    assert limit.reserve(NOW_S, 1) == pytest.approx(30)


def test_settling_gives_back_what_was_not_used_and_charges_what_was() -> None:
    limit = RateLimit(60_000)
    limit.reserve(NOW_S, 30_000)
    limit.settle(30_000, 10_000)
    assert limit.reserve(NOW_S, 1) == pytest.approx(10)
    limit.settle(1, 5_001)
    assert limit.reserve(NOW_S, 1) == pytest.approx(15, abs=0.01)


def test_without_a_limit_there_is_nothing_to_settle() -> None:
    limit = RateLimit(None)
    limit.settle(1, 1e9)
    assert limit.reserve(NOW_S, 1e9) == 0


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1)), min_size=2, max_size=60), st.integers(600, 100_000))
def test_over_time_no_more_is_used_than_the_rate_allows(starts: list[tuple[int, float]], per_minute: int) -> None:
    """The server counts less or more than was expected; only what is still unsettled may go beyond the rate."""
    limit, now_s, used = RateLimit(per_minute), NOW_S, 0.0
    for estimate, share in starts:
        now_s += limit.reserve(now_s, estimate)
        allowed = (now_s - NOW_S + 1) * per_minute / 60 + 5000
        assert used <= allowed + 1e-3
        used += estimate * share
        limit.settle(estimate, estimate * share)


BODY = {"messages": [{"role": "user", "content": "x" * 400}]}


@pytest.mark.parametrize(
    ("body", "default", "tokens"),
    [
        (BODY, None, 110 + ANSWER_TOKENS),
        (BODY, 50, 160),
        ({**BODY, "max_tokens": 7}, 50, 117),
        ({**BODY, "max_tokens": 7, "max_completion_tokens": 9}, 50, 119),
        ({**BODY, "max_tokens": "many"}, 50, 110 + ANSWER_TOKENS),
        ({**BODY, "max_tokens": None}, 50, 160),
    ],
)
def test_an_estimate_is_the_prompt_and_the_longest_answer(body: Any, default: int | None, tokens: float) -> None:
    assert estimate_tokens(body, 440, 0, default) == tokens


def test_pictures_count_by_number_not_by_bytes() -> None:
    parts = [
        {"type": "text", "text": "y" * 40},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10**6}},
        {"type": "image", "value": b"raw bytes"},
    ]
    tokens = estimate_tokens({"messages": [{"role": "user", "content": parts}]}, 2 * 10**6, 2, 100)
    assert 2 * TOKENS_PER_IMAGE + 110 <= tokens <= 2 * TOKENS_PER_IMAGE + 130


def test_requests_pass_one_after_the_other_and_those_that_try_again_first() -> None:
    async def run() -> list[str]:
        pacer, order = Pacer(6000, None, Throttle()), list[str]()

        async def pass_by(name: str, returning: bool) -> None:
            await pacer.wait(0, returning=returning)
            order.append(name)

        for _ in range(100):
            await pacer.wait(0)  # the burst is gone
        new = [asyncio.create_task(pass_by(f"new {n}", False)) for n in range(3)]
        await asyncio.sleep(0)
        again = [asyncio.create_task(pass_by(f"again {n}", True)) for n in range(2)]
        await asyncio.wait_for(asyncio.gather(*new, *again), 2)
        return order

    assert asyncio.run(run()) == ["new 0", "again 0", "again 1", "new 1", "new 2"]


@pytest.mark.parametrize("place", [0, 1])
def test_one_that_gives_up_holds_up_nobody(place: int) -> None:
    async def run() -> None:
        pacer = Pacer(600, None, Throttle())
        for _ in range(10):
            await pacer.wait(0)  # the burst is gone
        waiting = [asyncio.create_task(pacer.wait(0)) for _ in range(2)]
        await asyncio.sleep(0.01)
        waiting[place].cancel()
        await asyncio.wait_for(waiting[1 - place], 2)

    asyncio.run(run())


def test_one_that_gives_up_just_when_its_turn_comes_passes_it_on() -> None:
    async def run() -> None:
        pacer = Pacer(600, None, Throttle())
        for _ in range(10):
            await pacer.wait(0)  # the burst is gone
        waiting = [asyncio.create_task(pacer.wait(0)) for _ in range(3)]
        await asyncio.sleep(0.01)
        waiting[0].cancel()
        await asyncio.sleep(0)  # the first hands its turn to the second, which has not run yet
        waiting[1].cancel()
        await asyncio.wait_for(waiting[2], 2)

    asyncio.run(run())


def test_both_limits_hold_and_their_time_is_throttled() -> None:
    async def run() -> tuple[float, int]:
        throttle = Throttle()
        pacer = Pacer(60_000, 60_000, throttle)
        started = time.monotonic()
        for _ in range(4):
            await pacer.wait(500)  # two at once, then one every half second
        return time.monotonic() - started, throttle.take_seconds()

    seconds, throttled = asyncio.run(run())
    assert 0.95 <= seconds < 1.5
    assert throttled in (0, 1)  # whole seconds of about one
