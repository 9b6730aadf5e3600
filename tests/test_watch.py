"""The one timer that ends tries: silence, the whole time, and cancellations that are somebody else's."""

from __future__ import annotations

import asyncio

import pytest

from beam_llm.watch import Watch, takes_cancellation


async def watched_sleep(watch: Watch, seconds: float, ends_s: float, heard_every_s: float | None = None) -> str:
    """Sleeps under watch; tells how that ended."""
    now_s = asyncio.get_running_loop().time
    watched = watch.begin(now_s(), ends_s)
    done_s = now_s() + seconds
    try:
        while now_s() < done_s:
            await asyncio.sleep(min(heard_every_s or seconds, max(0.0, done_s - now_s())))
            watched.silent_since_s = now_s()
    except asyncio.CancelledError:
        if not takes_cancellation(watched):
            raise
        return type(watched.over).__name__
    finally:
        watch.end(watched)
    return "done"


@pytest.mark.parametrize(
    ("seconds", "total_s", "heard_every_s", "ending"),
    [
        (0.02, 9.0, None, "done"),
        (5.0, 9.0, None, "SocketTimeoutError"),
        (5.0, 0.05, None, "TimeoutError"),
        (5.0, 0.4, 0.01, "TimeoutError"),
        (0.3, 9.0, 0.01, "done"),
    ],
)
def test_a_try_ends_by_silence_or_by_its_whole_time(
    seconds: float, total_s: float, heard_every_s: float | None, ending: str
) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        watch = Watch(read_timeout_s=0.1, shortest_s=0.1, clock=loop.time)
        begun_s = loop.time()
        found = await asyncio.gather(
            *(watched_sleep(watch, seconds, begun_s + total_s, heard_every_s) for _ in range(100))
        )
        assert found == [ending] * 100
        assert loop.time() - begun_s < 3
        await asyncio.sleep(0)  # what follows in the task is not cancelled
        watch.close()

    asyncio.run(work())


def test_a_cancellation_of_somebody_else_goes_through() -> None:
    async def work() -> None:
        watch = Watch(5, 5, asyncio.get_running_loop().time)
        task = asyncio.create_task(watched_sleep(watch, 9, 1e9))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        watch.close()

    asyncio.run(work())


def test_a_watch_with_nothing_to_watch_has_no_timer() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        watch = Watch(0.05, 0.05, loop.time)
        assert await watched_sleep(watch, 0.01, 1e9) == "done"
        await asyncio.sleep(0.03)
        assert watch._timer is None
        assert await watched_sleep(watch, 9, 1e9) == "SocketTimeoutError", "and looks again when there is"
        watch.close()

    asyncio.run(work())
