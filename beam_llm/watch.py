"""Watch: ends tries that take too long, all of them with one timer.

aiohttp's own timeouts start and stop several timers for each request: a fifth of the CPU of a short one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

_SHARE = 0.1
_LONGEST_PERIOD_S, _SHORTEST_PERIOD_S = 1.0, 0.01
"""How often the tries are looked through: timeouts are kept to within a tenth, or a second."""


@dataclass(slots=True, eq=False)
class Watched:
    """One try under watch.

    Args:
        task: What is cancelled when its time is over.
        silent_since_s: When something was last heard of the server, or sent to it.
        ends_s: When the try must be done.
        over: Why it was cancelled; None if it was not.
    """

    task: asyncio.Task[object]
    silent_since_s: float
    ends_s: float
    over: Exception | None = None


class Watch:
    """Keeps the tries of one event loop within their time.

    Args:
        read_timeout_s: Longest silence.
        shortest_s: The shortest time that any try may be given, which decides how often one looks.
        clock: Seconds; that of the loop.
    """

    def __init__(self, read_timeout_s: float, shortest_s: float, clock: Callable[[], float]) -> None:
        self._read_timeout_s = read_timeout_s
        shortest_s = min(read_timeout_s, shortest_s)
        self._period_s = min(_LONGEST_PERIOD_S, max(_SHORTEST_PERIOD_S, _SHARE * shortest_s))
        self._clock = clock
        self._open: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, now_s: float, ends_s: float) -> Watched:
        """Starts to watch the current task's try; end it with `end`."""
        task = asyncio.current_task()
        assert task is not None, "a try runs in a task"
        watched = Watched(task, now_s, ends_s)
        self._open.add(watched)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._look)
        return watched

    def end(self, watched: Watched) -> None:
        """The try is done."""
        self._open.discard(watched)

    def _look(self) -> None:
        now_s = self._clock()
        for watched in [one for one in self._open if self._is_over(one, now_s)]:
            self._open.discard(watched)
            watched.task.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._look) if self._open else None

    def _is_over(self, watched: Watched, now_s: float) -> bool:
        if now_s >= watched.ends_s:
            watched.over = asyncio.TimeoutError()
        elif now_s - watched.silent_since_s >= self._read_timeout_s:
            watched.over = aiohttp.SocketTimeoutError()
        return watched.over is not None

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()


def takes_cancellation(watched: Watched) -> bool:
    """Whether a cancellation of the current task is the watch's and nobody else's; then it counts as taken."""
    if watched.over is None:
        return False
    return sys.version_info < (3, 11) or watched.task.uncancel() == 0
