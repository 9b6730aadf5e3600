"""How much at once: the in-flight limit of a process, the share of it that an endpoint can bear, the time held back."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

LOOK_S = 1.0
"""A share is looked at once in this time: 500 refusals at the same moment count once."""

EARLY_LOOK_S = 0.2
"""Sooner when as many as may be open were refused, as by a full queue: it would refuse thousands in a second."""

HOLD_S = 5.0
LONGEST_HOLD_S = 60.0
"""How long a share stays below what was too much the last time, before it tries again."""

FEW = 20
"""A look counts this many verdicts at least, the missing ones as answers: one failure in slow traffic says little."""

FIRST_STEP = 1 / 256
LARGEST_STEP = 1 / 32


class AdaptiveShare:
    """Which share of the ceiling an endpoint can bear, judged by what becomes of its requests: AIMD, as in TCP.

    Looked at with a verdict, about once a second. A look cuts the share by half the fraction that was refused, and
    adds a step if anything was answered. All refused: it is halved. One in fifty refused, whatever the load: the step
    makes up for it, and the share stays whole; cutting in proportion is DCTCP's idea (RFC 8257). Where most were
    refused, it also goes down to nine tenths of what is open at that moment, the flight size of RFC 5681: a full server
    refuses at once and works on the rest.

    The step doubles with every look from 1/256 to 1/32 of the ceiling and starts anew when most were refused. From
    nothing to the whole takes 35 looks; where verdicts are further apart than a second, so are looks. But where most
    were refused, it stays below what was open then for 5 s, and twice as long each time that trying a little more was
    in vain, as CUBIC stays on its plateau (RFC 9438): at every try a full server refuses hundreds of requests, each of
    which has only so many tries. OpenAI's `slow_down` wants a ramp over many minutes above a million tokens a minute;
    who needs that sets `tokens_per_minute`.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._step = FIRST_STEP
        self._looked_s = -math.inf
        self._cut_s = -math.inf
        self._bound = 0.0
        self._bound_until_s = -math.inf
        self._hold_s = HOLD_S
        self._answered = 0
        self._refused = 0

    def allowed(self, ceiling: int) -> int:
        """Open requests that it stands for; never below one, or nothing would show that the endpoint has recovered."""
        return max(1, int(self.share * ceiling))

    def observe(self, refused: bool, sent_s: float, now_s: float, in_flight: int, ceiling: int) -> None:
        """Takes one verdict.

        Args:
            refused: Whether it is a sign of overload, or an answer.
            sent_s: When the request was sent. Refusals of what was sent before the share was cut for a flood of them do
                not cut it again: one cut for one window, as in RFC 6582.
            now_s: The clock.
            in_flight: Open at the endpoint now.
            ceiling: Allowed for the whole share.
        """
        if refused:
            self._refused += sent_s > self._cut_s
        else:
            self._answered += 1
        passed_s = now_s - self._looked_s
        flood = passed_s >= EARLY_LOOK_S and self._refused >= max(FEW, self._answered, self.allowed(ceiling))
        if passed_s >= LOOK_S or flood:
            self._look(now_s, in_flight / ceiling)

    def _look(self, now_s: float, in_use: float) -> None:
        refused = self._refused / max(FEW, self._refused + self._answered)
        growth = self._step if self._answered else 0.0
        cut = self.share * (1 - refused / 2)
        if refused > 0.5:
            self._cut(cut, 0.9 * in_use, now_s)
        else:
            bound = self._bound if now_s < self._bound_until_s else 1.0
            self.share = max(cut, min(bound, cut + growth))
            self._step = min(LARGEST_STEP, 2 * self._step) if self.share < bound else FIRST_STEP
        self._looked_s = now_s
        self._answered = self._refused = 0

    def _cut(self, cut: float, bound: float, now_s: float) -> None:
        if now_s < self._bound_until_s:
            tried_more = False
        else:
            tried_more = self.share < 2 * self._bound
            self._hold_s = min(LONGEST_HOLD_S, 2 * self._hold_s) if tried_more else HOLD_S
        self.share = min(self.share if tried_more else cut, bound)
        self._step = FIRST_STEP
        self._cut_s = now_s
        self._bound = bound
        self._bound_until_s = now_s + self._hold_s


class Throttle:
    """Wall time in which requests that could have been sent were held back, however many there were.

    By a rate limit, an endpoint's pause or cool-down, or a limit that has shrunk; a request's own backoff is none of
    these. Begun and ended on the loop thread.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._holding = 0
        self._since_s = 0.0
        self._kept_s = 0.0

    def begin(self) -> None:
        """One reason more to hold requests back."""
        with self._lock:
            self._count()
            self._holding += 1

    def end(self) -> None:
        """One reason less."""
        with self._lock:
            self._count()
            self._holding -= 1

    def take_seconds(self) -> int:
        """Whole seconds since the last call, for a counter; what is over stays for the next. From any thread."""
        with self._lock:
            self._count()
            whole = int(self._kept_s)
            self._kept_s -= whole
            return whole

    def _count(self) -> None:
        now_s = self._clock()
        if self._holding:
            self._kept_s += now_s - self._since_s
        self._since_s = now_s


class InFlightLimit:
    """A count of open requests with a maximum. Requests that come back from a wait go before new ones.

    Args:
        ceiling: Open requests allowed at best; 1 or more.
        on_free: Called when a slot came free that no returning request wanted.
        throttle: Told while a lowered maximum holds requests back.
    """

    def __init__(
        self, ceiling: int, on_free: Callable[[], None] = lambda: None, throttle: Throttle | None = None
    ) -> None:
        self.ceiling = ceiling
        self.throttle = throttle or Throttle()
        self._allowed: int | None = None
        self._on_free = on_free
        self.maximum = ceiling
        self.open = 0
        self.peak = 0
        self._returning: deque[asyncio.Future[None]] = deque()
        self._refused_new = False
        self._holds_back = False

    @property
    def free(self) -> int:
        """Slots that a new request may take now."""
        return max(0, self.maximum - self.open - len(self._returning))

    def raise_ceiling(self, ceiling: int) -> None:
        """Sets how many may be open at best."""
        self.ceiling = ceiling
        self.adapt(self._allowed)

    def adapt(self, allowed: int | None) -> None:
        """Sets how many may be open now, up to the ceiling; 0 = none, None = as many as at best.

        What is open stays open.
        """
        self._allowed = allowed
        self.maximum = self.ceiling if allowed is None else min(self.ceiling, allowed)
        self._let_in()

    def try_take(self) -> bool:
        """Takes a slot for a new request, if one is free; if not, `on_free` says when it is worth another try."""
        if self.free:
            self._take()
            return True
        self._refused_new = True
        self._note()
        return False

    def release(self) -> None:
        """Gives a slot back; the next returning request gets it, else it is free for a new one."""
        self.open -= 1
        self._let_in()

    async def retake(self) -> None:
        """A slot for a request that gave its own back while it waited to try again."""
        waiter = asyncio.get_running_loop().create_future()
        self._returning.append(waiter)
        self._admit()
        self._note()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()
            else:
                with suppress(ValueError):  # a release has passed it over already
                    self._returning.remove(waiter)
                self._let_in()
            raise

    def _take(self) -> None:
        self.open += 1
        self.peak = max(self.peak, self.open)

    def _let_in(self) -> None:
        self._admit()
        if self.free:
            self._refused_new = False
            self._on_free()
        self._note()

    def _admit(self) -> None:
        while self._returning and self.open < self.maximum:
            waiter = self._returning.popleft()
            if not waiter.cancelled():
                self._take()
                waiter.set_result(None)

    def _note(self) -> None:
        full = self.maximum <= self.open and self.maximum < self.ceiling
        holds_back = full and (self._refused_new or bool(self._returning))
        if holds_back != self._holds_back:
            self._holds_back = holds_back
            (self.throttle.begin if holds_back else self.throttle.end)()
