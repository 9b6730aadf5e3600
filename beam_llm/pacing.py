"""How fast: requests and tokens per minute, and the line in which requests wait for their turn. Loop thread only."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from beam_llm.limits import Throttle

BYTES_PER_TOKEN = 4
"""OpenAI's rule of thumb for English; the server's count settles it."""

TOKENS_PER_IMAGE = 1000
"""The order of magnitude at OpenAI and of Qwen-VL for a photograph; its base64 says nothing about it."""

ANSWER_TOKENS = 256
"""Expected of an answer whose length nobody limits."""


class RateLimit:
    """An even pace: `per_minute` requests or tokens a minute, with up to `burst_s` seconds' worth at once.

    Args:
        per_minute: Allowed in a minute; None = no limit.
        burst_s: How much may be saved up while idle, in seconds of the pace.
    """

    def __init__(self, per_minute: float | None, burst_s: float = 1.0) -> None:
        self._unit_s = 60 / per_minute if per_minute else 0.0
        self._burst_s = burst_s
        self._next_s = 0.0

    def reserve(self, now_s: float, amount: float = 1.0) -> float:
        """Seconds to wait before the next start, which is thereby taken; 0 = go.

        Args:
            now_s: The clock.
            amount: What the start uses up; more than the burst is let through as soon as nothing is owed.
        """
        if not self._unit_s:
            return 0.0
        # The generic cell rate algorithm: one number, the time at which the next start would be exactly on pace.
        cost_s = amount * self._unit_s
        due_s = max(self._next_s, now_s - max(self._burst_s, cost_s) + cost_s)
        self._next_s = due_s + cost_s
        return max(0.0, due_s - now_s)

    def settle(self, estimate: float, actual: float) -> None:
        """Replaces what a start was thought to use up by what it did."""
        self._next_s += (actual - estimate) * self._unit_s


class Pacer:
    """The line in which requests wait for both rate limits: one after the other, those that try again first.

    Only the first in line has reserved its start, so that one that comes back need not wait behind a thousand starts
    that were promised before, and nothing is used up by requests that are given up while they wait.

    Args:
        requests_per_minute: None = no limit.
        tokens_per_minute: None = no limit.
        throttle: Told while anyone waits.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        requests_per_minute: float | None,
        tokens_per_minute: float | None,
        throttle: Throttle,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = requests_per_minute is not None or tokens_per_minute is not None
        self.counts_tokens = tokens_per_minute is not None
        self._requests = RateLimit(requests_per_minute)
        self._tokens = RateLimit(tokens_per_minute)
        self._throttle = throttle
        self._clock = clock
        self._busy = False
        self._returning: deque[asyncio.Future[None]] = deque()
        self._new: deque[asyncio.Future[None]] = deque()

    async def wait(self, tokens: float, *, returning: bool = False) -> None:
        """Comes back when a request may start.

        Args:
            tokens: What it is expected to use up; see `settle`.
            returning: Whether it tries again.
        """
        if not self.limits:
            return
        await self._come_first(self._returning if returning else self._new)
        try:
            now_s = self._clock()
            wait_s = max(self._requests.reserve(now_s), self._tokens.reserve(now_s, tokens))
            if wait_s > 0:
                await self._hold_back(wait_s)
        finally:
            self._pass_on()

    def settle(self, estimate: float, actual: float) -> None:
        """Replaces a start's expected tokens by those that the server counted."""
        self._tokens.settle(estimate, actual)

    async def _come_first(self, line: deque[asyncio.Future[None]]) -> None:
        if not self._busy:
            self._busy = True
            return
        turn = asyncio.get_running_loop().create_future()
        line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    async def _hold_back(self, wait_s: float) -> None:
        self._throttle.begin()
        try:
            await asyncio.sleep(wait_s)
        finally:
            self._throttle.end()

    def _pass_on(self) -> None:
        for line in (self._returning, self._new):
            while line:
                if not (turn := line.popleft()).cancelled():
                    turn.set_result(None)
                    return
        self._busy = False


def estimate_tokens(body: Mapping[str, Any], size: int, images: int, max_tokens: int | None) -> float:
    """What a request will use up of `tokens_per_minute`, guessed before it is sent: prompt and answer.

    Args:
        body: The request's fields, pictures still as references.
        size: Bytes of the JSON that is posted.
        images: Number of pictures in it.
        max_tokens: Of requests that set none; None = `ANSWER_TOKENS`.
    """
    prompt = _text_chars(body.get("messages")) if images else size
    limit = next((body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name)), max_tokens)
    answer = limit if isinstance(limit, (int, float)) else ANSWER_TOKENS
    return prompt / BYTES_PER_TOKEN + images * TOKENS_PER_IMAGE + answer


def _text_chars(value: Any) -> int:
    if isinstance(value, str):
        return 0 if value.startswith("data:") else len(value)
    if isinstance(value, Mapping):
        return sum(map(_text_chars, value.values()))
    return sum(map(_text_chars, value)) if isinstance(value, (list, tuple)) else 0
