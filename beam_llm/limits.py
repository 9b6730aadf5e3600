"""How much at once: the in-flight limit of a process and its rate limit. Used on the loop thread only."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class InFlightLimit:
    """A count of open requests with a maximum. Requests that come back from a wait go before new ones.

    Args:
        maximum: Open requests allowed; 1 or more.
        on_free: Called when a slot came free that no returning request wanted.
    """

    def __init__(self, maximum: int, on_free: Callable[[], None] = lambda: None) -> None:
        self.maximum = maximum
        self._on_free = on_free
        self.open = 0
        self.peak = 0
        self._returning: deque[asyncio.Future[None]] = deque()

    @property
    def free(self) -> int:
        """Slots that a new request may take now."""
        return max(0, self.maximum - self.open - len(self._returning))

    def take(self) -> None:
        """A slot for a new request; ask `free` first."""
        self.open += 1
        self.peak = max(self.peak, self.open)

    def release(self) -> None:
        """Gives a slot back; the next returning request gets it, else it is free for a new one."""
        self.open -= 1
        self._admit()
        if self.free:
            self._on_free()

    async def retake(self) -> None:
        """A slot for a request that gave its own back while it waited to try again."""
        waiter = asyncio.get_running_loop().create_future()
        self._returning.append(waiter)
        self._admit()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()
            raise

    def _admit(self) -> None:
        while self._returning and self.open < self.maximum:
            waiter = self._returning.popleft()
            if not waiter.cancelled():
                self.take()
                waiter.set_result(None)


class RateLimit:
    """An even pace: `per_minute` starts a minute, with up to `burst_s` seconds' worth at once.

    Args:
        per_minute: Starts allowed in a minute; None = no limit.
        burst_s: How much may be saved up while idle, in seconds of the pace.
    """

    def __init__(self, per_minute: float | None, burst_s: float = 1.0) -> None:
        self._interval_s = 60 / per_minute if per_minute else 0.0
        self._burst_s = max(burst_s, self._interval_s)
        self._next_s = 0.0

    def reserve(self, now_s: float) -> float:
        """Seconds to wait before the next start, which is thereby taken; 0 = go."""
        if not self._interval_s:
            return 0.0
        # The generic cell rate algorithm: one number, the time at which the next start would be exactly on pace.
        due = max(self._next_s, now_s - self._burst_s + self._interval_s)
        self._next_s = due + self._interval_s
        return max(0.0, due - now_s)
