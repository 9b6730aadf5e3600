"""The in-flight limit, the share of it that an endpoint can bear, and the time in which requests were held back."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_llm.limits import EARLY_LOOK_S, FIRST_STEP, LOOK_S, AdaptiveShare, InFlightLimit, Throttle

NOW_S = 1_000_000.0


@dataclass
class Clock:
    now_s: float = NOW_S

    def __call__(self) -> float:
        return self.now_s


def full_limit(maximum: int) -> InFlightLimit:
    limit = InFlightLimit(maximum)
    for _ in range(maximum):
        assert limit.try_take()
    return limit


async def turn_the_loop() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_free_slots_are_counted_down_and_up() -> None:
    limit = InFlightLimit(2)
    assert (limit.free, limit.open) == (2, 0)
    assert [limit.try_take() for _ in range(3)] == [True, True, False]
    assert (limit.free, limit.open, limit.peak) == (0, 2, 2)
    limit.release()
    assert (limit.free, limit.open, limit.peak) == (1, 1, 2)


def test_a_lowered_maximum_leaves_nothing_free_until_enough_have_gone() -> None:
    limit = full_limit(3)
    limit.adapt(1)
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


def test_a_raised_ceiling_lets_returning_requests_in_first() -> None:
    async def run() -> None:
        limit = full_limit(1)
        returning = [asyncio.create_task(limit.retake()) for _ in range(2)]
        await turn_the_loop()
        limit.raise_ceiling(4)
        assert (limit.open, limit.free) == (3, 1)
        await asyncio.wait_for(asyncio.gather(*returning), 1)

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
            if step == 0:
                held += limit.try_take()
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


@pytest.mark.parametrize(("allowed", "maximum"), [(0, 0), (3, 3), (9, 4), (None, 4)])
def test_what_is_allowed_now_never_exceeds_the_ceiling(allowed: int | None, maximum: int) -> None:
    limit = InFlightLimit(4)
    limit.adapt(allowed)
    assert sum(limit.try_take() for _ in range(9)) == limit.maximum == maximum


def test_a_raised_ceiling_does_not_lift_what_is_allowed_now() -> None:
    limit = InFlightLimit(16)
    limit.adapt(8)
    limit.raise_ceiling(1024)
    assert limit.maximum == 8
    limit.adapt(None)
    assert limit.maximum == 1024


def test_a_new_request_that_was_refused_hears_of_room() -> None:
    freed: list[int] = []
    limit = InFlightLimit(1, lambda: freed.append(limit.free))
    limit.adapt(0)
    assert not limit.try_take()
    limit.adapt(None)
    assert freed == [1]


def test_nothing_is_let_in_while_nothing_is_allowed_and_all_are_afterwards() -> None:
    async def run() -> None:
        limit = InFlightLimit(4)
        limit.adapt(0)
        returning = [asyncio.create_task(limit.retake()) for _ in range(3)]
        await turn_the_loop()
        assert limit.open == 0
        limit.adapt(None)
        await asyncio.wait_for(asyncio.gather(*returning), 1)
        assert limit.open == 3

    asyncio.run(run())


def test_time_is_throttled_only_while_a_lowered_limit_keeps_someone_waiting() -> None:
    clock = Clock()
    throttle = Throttle(clock)
    limit = InFlightLimit(2, throttle=throttle)

    def seconds_after(seconds: float) -> int:
        clock.now_s += seconds
        return throttle.take_seconds()

    assert [limit.try_take() for _ in range(3)] == [True, True, False]
    assert seconds_after(10) == 0  # full, but the limit is the user's own
    limit.adapt(1)
    assert seconds_after(10) == 10  # the request that was refused still waits
    limit.release()
    limit.release()
    assert seconds_after(10) == 0  # on_free has been told: nobody is known to wait
    limit.adapt(0)
    assert seconds_after(10) == 0
    assert not limit.try_take()
    assert seconds_after(10) == 10
    limit.adapt(None)
    assert seconds_after(10) == 0


def test_a_waiter_that_gives_up_is_no_longer_held_back() -> None:
    async def run() -> int:
        clock = Clock()
        limit = InFlightLimit(2, throttle=Throttle(clock))
        limit.adapt(0)
        returning = asyncio.create_task(limit.retake())
        await turn_the_loop()
        clock.now_s += 3
        returning.cancel()
        await turn_the_loop()
        clock.now_s += 5
        return limit.throttle.take_seconds()

    assert asyncio.run(run()) == 3


def test_throttled_time_is_wall_time_in_whole_seconds_and_nothing_is_lost() -> None:
    clock = Clock()
    throttle = Throttle(clock)
    taken = []
    for _ in range(3):
        throttle.begin()
        throttle.begin()  # a second reason at the same time adds nothing
        clock.now_s += 0.75
        throttle.end()
        clock.now_s += 0.75
        taken.append(throttle.take_seconds())
        throttle.end()
        clock.now_s += 100
    assert taken == [1, 2, 1]
    assert throttle.take_seconds() == 0


def looks(share: AdaptiveShare, count: int, *, refused: int = 0, answered: int = 0, start_s: float = NOW_S) -> float:
    """That many seconds with these verdicts spread over each; returns the time after them."""
    verdicts = [True] * refused + [False] * answered
    for number in range(count):
        for place, verdict in enumerate(verdicts):
            now_s = start_s + (number + place / len(verdicts)) * LOOK_S
            share.observe(verdict, now_s - 0.001, now_s, share.allowed(1000), 1000)
    return start_s + count * LOOK_S


def test_a_burst_of_refusals_counts_once() -> None:
    share = AdaptiveShare()
    now_s = looks(share, 3, answered=50)
    for number in range(500):
        share.observe(True, NOW_S, now_s - 0.001 + number * 1e-6, 1000, 1000)
    for number in range(500):  # the rest comes in one by one
        share.observe(True, NOW_S, now_s + 0.1 * number, 1000, 1000)
    assert 0.5 <= share.share < 0.6  # halved once, less what was answered in the same second
    assert share.allowed(1000) == int(share.share * 1000)


def test_refusals_go_on_cutting_down_to_one_request_and_no_further() -> None:
    share = AdaptiveShare()
    looks(share, 5, refused=100)
    assert share.allowed(1000) < 100
    looks(share, 50, refused=100, start_s=NOW_S + 5)
    assert share.allowed(1000) == share.allowed(1) == 1


def test_a_share_is_back_after_tens_of_seconds_with_answers() -> None:
    share = AdaptiveShare()
    now_s = looks(share, 60, refused=100)
    grown, seconds = [share.share], 0
    while share.share < 1:
        now_s = looks(share, 1, answered=100, start_s=now_s)
        grown.append(share.share)
        seconds += 1
    assert 20 <= seconds <= 45
    steps = [after - before for before, after in itertools.pairwise(grown)]
    assert steps[0] < 0.01  # careful at first
    assert max(steps) < 0.04


def test_growth_starts_carefully_after_a_cut() -> None:
    share = AdaptiveShare()
    now_s = looks(share, 6, refused=100)
    now_s = looks(share, 20, answered=100, start_s=now_s)
    high = share.share
    now_s = looks(share, 1, refused=100, start_s=now_s)
    low = share.share
    looks(share, 2, answered=100, start_s=now_s)
    assert low < 0.6 * high
    assert low < share.share <= low + 3 * FIRST_STEP


def test_time_without_answers_does_not_bring_a_share_back() -> None:
    share = AdaptiveShare()
    now_s = looks(share, 60, refused=100)
    low = share.share
    share.observe(True, now_s + 3600, now_s + 3600, 1, 1000)
    assert share.share <= low


@pytest.mark.parametrize(("refused", "low", "high"), [(1, 0.99, 1.0), (5, 0.9, 1.0), (20, 0.2, 0.4), (50, 0.05, 0.2)])
def test_refusals_that_do_not_depend_on_the_load_cost_their_proportion(refused: int, low: float, high: float) -> None:
    """Of 100 verdicts a second, for ten minutes: some servers drop one request in fifty whatever is open."""
    share = AdaptiveShare()
    looks(share, 600, refused=refused, answered=100 - refused)
    assert low <= share.share <= high


def full_server(seconds: int) -> list[int]:
    """How many of 1,000 may be open, every tenth of a second, at a server that bears 100.

    Whoever comes above that is refused at once and the next one takes its place, two thousand in a second; what is not
    refused is answered after a second.
    """
    share, allowed = AdaptiveShare(), list[int]()
    for tick in range(10 * seconds):
        now_s = NOW_S + tick / 10
        allowed.append(share.allowed(1000))
        for verdict in [False] * min(10, allowed[-1] // 10) + [True] * (200 if allowed[-1] > 100 else 0):
            share.observe(verdict, now_s - (0 if verdict else 1), now_s, min(allowed[-1], 105), 1000)
    return allowed


def test_a_full_server_gets_what_it_bears_and_hardly_more() -> None:
    settled = full_server(120)[50:]
    assert 90 <= min(settled) <= max(settled) < 120
    assert sum(allowed > 100 for allowed in settled) / len(settled) < 0.1


def test_a_level_that_was_too_much_is_tried_more_and_more_seldom() -> None:
    too_much = [tick for tick, allowed in enumerate(full_server(600)) if allowed > 100]
    waits = [(after - before) / 10 for before, after in itertools.pairwise(too_much) if after - before > 10]
    assert 5 <= waits[0] <= 20
    assert waits == sorted(waits)
    assert 60 <= waits[-1] <= 80


def test_one_failure_in_slow_traffic_hardly_counts() -> None:
    share = AdaptiveShare()
    share.observe(True, NOW_S, NOW_S, 1, 1000)
    assert share.share > 0.95


def test_when_most_are_refused_what_is_open_is_what_the_server_bears() -> None:
    share = AdaptiveShare()
    now_s = looks(share, 3, answered=50)
    for _ in range(900):
        share.observe(True, NOW_S, now_s - 0.5, 1000, 1000)
    share.observe(True, NOW_S, now_s, 100, 1000)
    assert share.allowed(1000) == 90  # a little less: of what is open, some is about to be refused


@pytest.mark.parametrize(("refusals", "cut"), [(999, False), (1000, True)])
def test_as_many_refusals_as_may_be_open_do_not_wait_for_the_second_to_end(refusals: int, cut: bool) -> None:
    share = AdaptiveShare()
    now_s = looks(share, 3, answered=50) - LOOK_S
    for _ in range(refusals):
        share.observe(True, NOW_S, now_s + 1.01 * EARLY_LOOK_S, 1000, 1000)
    assert (share.allowed(1000) < 1000) is cut
