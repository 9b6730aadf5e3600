"""Where requests go: the URL that each form of base URL stands for, and the choice among several endpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from beam_llm.errors import ConfigError, ErrorKind, Verdict
from beam_llm.limits import AdaptiveShare, InFlightLimit

_VERSION = "/v1"
_EXPECTED = "base_url must be an http(s) URL such as http://localhost:8000/v1"

FAILURES = 5
"""Failures in a row after which an endpoint cools down; Envoy's `consecutive_5xx`."""

FIRST_COOL_DOWN_S = 0.5
"""The first cool-down; the next ones double."""

LONGEST_COOL_DOWN_S = 15.0
"""Short enough to notice within seconds that a server is back; Envoy's are longer, but it has other hosts."""

LONGEST_BEFORE_ANSWER_S = 2.0
"""The same for an endpoint that has never answered: it may still be starting, or its URL is wrong."""

SHORTEST_PAUSE_S = 1.0
"""A `Retry-After` of less than this concerns only the request that was told so."""

_ILL = frozenset(
    {
        ErrorKind.CONNECT,
        ErrorKind.DISCONNECTED,
        ErrorKind.SERVER_ERROR,
        ErrorKind.OVERLOADED,
        ErrorKind.TIMEOUT,
    }
)
_TOLD_TO_WAIT = frozenset({ErrorKind.RATE_LIMIT, ErrorKind.OVERLOADED})  # 429, 503, 529


def check_base_url(base_url: str) -> str:
    """The base URL without outer white space.

    Raises:
        ConfigError: Not an http(s) URL with a host, or one with a user and password, which must not stand in options.
    """
    url = base_url.strip()
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:  # `[` without `]`, a port that is no number
        raise ConfigError(f"{_EXPECTED}, got {url!r} ({error})") from None
    if "@" in parts.netloc:
        shown = urlunsplit(parts._replace(netloc="…@" + parts.netloc.rpartition("@")[2]))
        raise ConfigError(f"base_url must not carry a user or password, got {shown}; give the key by api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{_EXPECTED}, got {url!r}")
    return url


def request_url(base_url: str, path: str) -> str:
    """The URL that a request is posted to.

    | base_url | posted to, for `/v1/chat/completions` |
    | --- | --- |
    | `http://h`, `http://h/` | `http://h/v1/chat/completions` |
    | `http://h/v1`, `http://h/v1/` | `http://h/v1/chat/completions` |
    | `http://h/v1/chat/completions` | as given |
    | `http://h/api/v1/`, `http://h/v1beta/openai/` | that path + `/chat/completions` |
    | `https://h/openai/deployments/d?api-version=x` | that path + `/chat/completions?api-version=x` |

    Nothing is put behind a path that the user gave but the route itself, and no slash is doubled.

    Args:
        base_url: As the user gave it.
        path: `url` of a batch line, such as `/v1/chat/completions`.
    """
    parts = urlsplit(base_url)
    route = "/" + path.strip("/")
    if route.startswith(f"{_VERSION}/"):
        route = route[len(_VERSION) :]
    base = parts.path.rstrip("/")
    full = base if base.endswith(route) else (base or _VERSION) + route
    return urlunsplit((parts.scheme, parts.netloc, full, parts.query, ""))


class Endpoint:
    """One base URL, how many of this process's requests are open there, and how it fares.

    `requests` and `failures` count tries over its whole life.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.in_flight = 0
        self.requests = 0
        self.failures = 0
        self.share = AdaptiveShare()
        self.opens_s = -math.inf
        self.on_probation = False
        self.probe: Lease | None = None
        self._cooled_s = -math.inf
        self._cool_downs = 0
        self._failures_in_a_row = 0
        self._unreachable = False
        self._answered = False
        self._urls: dict[str, str] = {}

    def url(self, path: str) -> str:
        """Where a request with this path is posted to."""
        if path not in self._urls:
            self._urls[path] = request_url(self.base_url, path)
        return self._urls[path]

    def is_open(self, now_s: float) -> bool:
        """Whether it is in use: not paused, not cooling down, not on probation."""
        return now_s >= self.opens_s and not self.on_probation

    def room(self, now_s: float, ceiling: int) -> int:
        """How many more requests it may get now."""
        if now_s < self.opens_s:
            return 0
        if self.on_probation:
            return 1 if self.probe is None else 0
        return max(0, self.share.allowed(ceiling) - self.in_flight)

    def pause(self, until_s: float) -> None:
        """No requests before this time; a pause never ends sooner for a shorter one."""
        self.opens_s = max(self.opens_s, until_s)

    def observe(self, lease: Lease, verdict: Verdict, now_s: float, *, others_open: bool) -> None:
        """Takes the verdict on a try; failures in a row, or a failed probe, lead to a cool-down."""
        if lease.taken_s <= self._cooled_s:  # sent before the cool-down: it says nothing of the time after it
            return
        if verdict.kind not in _ILL:
            self._failures_in_a_row = 0
            self.on_probation = False
            if verdict.kind is None:
                self._cool_downs = 0
                self._answered = True
            return
        self._failures_in_a_row += 1
        if self.on_probation or self._failures_in_a_row >= FAILURES:
            self._unreachable = verdict.kind is ErrorKind.CONNECT
            if self._unreachable or others_open:
                self._cool_down(now_s)
            else:
                self.on_probation = False

    def reached(self, lease: Lease) -> None:
        """The probe's body has gone out: an endpoint that only could not be reached is back, before it answers."""
        if self.probe is lease and self._unreachable:
            self.on_probation = False

    def _cool_down(self, now_s: float) -> None:
        longest_s = LONGEST_COOL_DOWN_S if self._answered else LONGEST_BEFORE_ANSWER_S
        self.pause(now_s + min(longest_s, FIRST_COOL_DOWN_S * 2.0**self._cool_downs))
        self._cool_downs = min(self._cool_downs + 1, 64)
        self._cooled_s = now_s
        self._failures_in_a_row = 0
        self.on_probation = True


@dataclass(eq=False, slots=True)
class Lease:
    """One try's place at an endpoint, from `EndpointPool.take` to `release`."""

    endpoint: Endpoint
    taken_s: float


class EndpointPool:
    """Picks the endpoint with the fewest open requests, in turn among equals; leaves out those that had better rest.

    - `Retry-After` on a 429 or 503 pauses an endpoint for all requests.
    - Connections that fail five times in a row let it cool down, half a second at first, 15 s at most. Then one request
      goes there, the probe; the others follow when it gets through. Other failures in a row (5xx, lost connections,
      timeouts) do so only while another endpoint is open: with nowhere else to go, each request's backoff is enough.
    - Each endpoint has its own `AdaptiveShare` of the in-flight limit, so a slow replica does not shrink the others.
      The ceiling is common: those that are left may take over all of the load.

    The in-flight limit of the process follows: `adapt` lowers it to what the endpoints can take, to nothing if need be.

    Args:
        base_urls: One or more.
        limit: The process's in-flight limit.
    """

    def __init__(self, base_urls: Sequence[str], limit: InFlightLimit) -> None:
        self.endpoints = [Endpoint(url) for url in base_urls]
        self.strained = False
        self._limit = limit

    def take(self, now_s: float, avoid: Endpoint | None = None) -> Lease | None:
        """A place at the least loaded endpoint that has room; give it back with `release`.

        Args:
            now_s: The clock.
            avoid: Taken only if no other has room: the one that has just failed this request.

        Returns:
            None if none has room. After `adapt`, the in-flight limit lets no request in before one has.
        """
        ceiling = self._limit.ceiling
        with_room = [endpoint for endpoint in self.endpoints if endpoint.room(now_s, ceiling)]
        if not with_room:
            return None
        endpoint = min(with_room, key=lambda e: (e is avoid, e.in_flight)) if len(with_room) > 1 else with_room[0]
        endpoint.in_flight += 1
        endpoint.requests += 1
        lease = Lease(endpoint, now_s)
        if endpoint.on_probation:
            endpoint.probe = lease
        if len(self.endpoints) > 1:
            self.endpoints.remove(endpoint)
            self.endpoints.append(endpoint)  # equals take turns
        return lease

    def release(self, lease: Lease) -> None:
        """Counts one request less."""
        lease.endpoint.in_flight -= 1
        if lease.endpoint.probe is lease:
            lease.endpoint.probe = None

    def judged(self, lease: Lease, verdict: Verdict, retry_after_s: float | None, now_s: float) -> bool:
        """Takes the verdict on a try, before its `release`.

        Args:
            lease: The try's place.
            verdict: What came of it.
            retry_after_s: What the server asked for; None if nothing.
            now_s: The clock.

        Returns:
            Whether the endpoint now pauses for as long as the server asked.
        """
        endpoint = lease.endpoint
        if verdict.kind is not None:
            endpoint.failures += 1
            self.strained = True
        refused = verdict.shrinks or verdict.kind is ErrorKind.RATE_LIMIT
        if refused or not verdict.retryable:  # an answer, or words about the row: the server is at work
            endpoint.share.observe(refused, lease.taken_s, now_s, endpoint.in_flight, self._limit.ceiling)
        others_open = len(self.endpoints) > 1 and any(e.is_open(now_s) for e in self.endpoints if e is not endpoint)
        endpoint.observe(lease, verdict, now_s, others_open=others_open)
        if verdict.kind not in _TOLD_TO_WAIT or retry_after_s is None or retry_after_s < SHORTEST_PAUSE_S:
            return False
        endpoint.pause(now_s + retry_after_s)
        return True

    def opens_in_s(self, now_s: float) -> float | None:
        """Seconds until the next endpoint's pause or cool-down ends; None if none has one."""
        waits = [endpoint.opens_s - now_s for endpoint in self.endpoints if endpoint.opens_s > now_s]
        return min(waits) if waits else None

    def adapt(self, now_s: float) -> None:
        """Fits the in-flight limit to the endpoints: after every release while `strained`, and when one opens."""
        self.strained = not all(e.is_open(now_s) and e.share.share >= 1 for e in self.endpoints)
        ceiling = self._limit.ceiling
        rooms = (endpoint.in_flight + endpoint.room(now_s, ceiling) for endpoint in self.endpoints)
        self._limit.adapt(sum(rooms) if self.strained else None)
