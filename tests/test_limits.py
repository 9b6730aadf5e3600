"""The in-flight limit and the rate limit."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_llm.limits import InFlightLimit, RateLimit

NOW_S = 1_000_000.0


def full_limit(maximum: int) -> InFlightLimit:
    limit = InFlightLimit(maximum)
    for _ in range(maximum):
        limit.take()
    return limit


async def turn_the_loop() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_free_slots_are_counted_down_and_up() -> None:
    limit = InFlightLimit(2)
    assert (limit.free, limit.open) == (2, 0)
    limit.take()
    limit.take()
    assert (limit.free, limit.open, limit.peak) == (0, 2, 2)
    limit.release()
    assert (limit.free, limit.open, limit.peak) == (1, 1, 2)


def test_a_lowered_maximum_leaves_nothing_free_until_enough_have_gone() -> None:
    limit = full_limit(3)
    limit.maximum = 1
    assert limit.free == 0
    for free in (0, 0, 1):
        limit.release()
        assert limit.free == free


def test_a_returning_request_takes_a_free_slot_at_once() -> None:
    async def run() -> None:
        limit = InFlightLimit(1)
        await asyncio.wait_for(limit.retake(), 1)
        assert (limit.open, limit.free) == (1, 0)

    asyncio.run(run())


def test_returning_requests_go_before_new_ones_in_their_order() -> None:
    async def run() -> None:
        limit, order = full_limit(1), list[str]()

        async def come_back(name: str) -> None:
            await limit.retake()
            order.append(name)

        tasks = [asyncio.create_task(come_back(name)) for name in "ab"]
        await turn_the_loop()
        assert (order, limit.free) == ([], 0)
        limit.release()
        assert limit.free == 0  # the slot is promised already: a new request must not slip in
        await turn_the_loop()
        assert order == ["a"]
        limit.release()
        await asyncio.gather(*tasks)
        assert (order, limit.open) == (["a", "b"], 1)

    asyncio.run(run())


def test_a_raised_maximum_keeps_slots_for_returning_requests() -> None:
    async def run() -> None:
        limit = full_limit(1)
        returning = [asyncio.create_task(limit.retake()) for _ in range(2)]
        await turn_the_loop()
        limit.maximum = 4
        assert limit.free == 1  # of three, two are promised
        limit.release()
        await asyncio.wait_for(asyncio.gather(*returning), 1)
        assert (limit.open, limit.free) == (2, 2)

    asyncio.run(run())


@pytest.mark.parametrize("granted", [False, True])
def test_a_cancelled_return_gives_its_slot_back(granted: bool) -> None:
    async def run() -> None:
        limit = full_limit(1)
        gone, next_one = (asyncio.create_task(limit.retake()) for _ in range(2))
        await turn_the_loop()
        if granted:
            limit.release()  # the slot is handed over, but the task has not run yet
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        if not granted:
            limit.release()
        await asyncio.wait_for(next_one, 1)
        assert limit.open == 1
        limit.release()
        assert (limit.open, limit.free) == (0, 1)

    asyncio.run(run())


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 4))
def test_open_requests_never_exceed_the_maximum_and_all_slots_come_back(steps: list[int], maximum: int) -> None:
    async def run() -> None:
        limit, waiting, held = InFlightLimit(maximum), list[asyncio.Task[None]](), 0
        for step in steps:
            if step == 0 and limit.free:
                limit.take()
                held += 1
            elif step == 1:
                waiting.append(asyncio.create_task(limit.retake()))
            elif step == 2 and held:
                limit.release()
                held -= 1
            elif step == 3 and waiting:
                waiting.pop().cancel()
            await turn_the_loop()
            held += sum(task.done() and not task.cancelled() for task in waiting)
            waiting = [task for task in waiting if not task.done()]
            assert limit.open == held <= limit.peak <= maximum
        for task in waiting:
            task.cancel()
        await turn_the_loop()
        for _ in range(held):
            limit.release()
        assert (limit.open, limit.free) == (0, maximum)

    asyncio.run(run())


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
