"""Channel: one bundle's side of the driver. Requests go in, outcomes come back, each with its own token."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from beam_llm.body import PreparedRequest
from beam_llm.config import ChatConfig
from beam_llm.records import Outcome

_CHECK_S = 1.0
"""Longest sleep before looking whether the loop thread is still there."""

Result = tuple[Any, Outcome]


@dataclass(eq=False, slots=True)
class Job:
    """A request in the driver's queue; `token` comes back with its outcome.

    `unsent_bytes` is what its body weighs until it is written; `begun` tells whether its task has run at all.
    """

    channel: Channel
    token: Any
    prepared: PreparedRequest
    unsent_bytes: int = 0
    begun: bool = False


class JobQueue(Protocol):
    """The driver, as its channels see it."""

    config: ChatConfig
    unsent_bytes: int

    def accept(self, jobs: list[Job]) -> None:
        """Takes jobs over without waiting."""

    def abandon(self, channel: Channel) -> None:
        """Drops a channel's jobs."""

    def check(self) -> None:
        """Raises RunStoppedError where waiting is pointless."""

    def wait_for(self, channel: Channel) -> None:
        """The channel's bundle thread is about to sleep."""

    def awake(self, channel: Channel) -> None:
        """The channel's bundle thread runs again."""


class Channel:
    """Used by one bundle thread; the driver's loop thread delivers into it.

    `pending` counts requests whose outcome has not been taken yet. Each counter is written by one thread only: an
    increment is not atomic.
    """

    def __init__(self, driver: JobQueue) -> None:
        self.pending = 0
        self.begun = 0
        self.abandoned = False
        self.wants_room = False
        self.waking = False
        self._submitted = 0
        self._driver = driver
        self._done: deque[Result] = deque()
        self._event = threading.Event()

    # Bundle thread.

    def submit(self, requests: Iterable[tuple[Any, PreparedRequest]]) -> None:
        """Hands requests over without waiting; each with a token that comes back with its outcome."""
        jobs = [Job(self, token, prepared) for token, prepared in requests]
        self.pending += len(jobs)
        self._submitted += len(jobs)
        self._driver.accept(jobs)

    def poll(self) -> list[Result]:
        """What has finished since the last call, in order of finishing; never waits."""
        results = []
        while self._done:
            results.append(self._done.popleft())
        self.pending -= len(results)
        return results

    def has_room(self) -> bool:
        """Whether another batch may come: little is queued, and unsent bodies are within the limit of bytes."""
        config = self._driver.config
        queued = self._submitted - self.begun
        return queued <= config.batch_size and self._driver.unsent_bytes <= config.max_in_flight_bytes

    def wait(self, *, for_room: bool) -> list[Result]:
        """Sleeps until something has finished or, if asked for, there is room; returns what has finished.

        Raises:
            RunStoppedError: The run is doomed.
        """
        self._event.clear()
        self.wants_room = for_room
        self._driver.wait_for(self)
        try:
            # Asked again after `wait_for`: what the loop thread did before it, it did without waking us.
            if not self._done and not (for_room and self.has_room()):
                self._event.wait(_CHECK_S)
        finally:
            self._driver.awake(self)
        self._driver.check()
        return self.poll()

    def abandon(self) -> None:
        """The bundle failed: outcomes are no longer wanted."""
        self.abandoned = True
        self._driver.abandon(self)

    # Loop thread.

    def deliver(self, token: Any, outcome: Outcome) -> None:
        """Keeps an outcome for the bundle thread."""
        if not self.abandoned:
            self._done.append((token, outcome))

    def wake(self) -> None:
        """Ends the bundle thread's sleep."""
        self.waking = False
        self._event.set()
