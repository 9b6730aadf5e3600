"""When and how a request is tried again: what the server asked for, the backoff, and the decision."""

from __future__ import annotations

import calendar
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_tz

from beam_llm.errors import ConfigError, ErrorKind, Verdict
from beam_llm.field_types import check_field_types

EMPTY_KINDS = (ErrorKind.EMPTY_CHOICES, ErrorKind.NULL_CONTENT)
"""Failures in which a server did answer, and charged for it."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently one request is tried again.

    Args:
        max_retries: Resends after the first try; 0 turns retries off.
        initial_backoff_s: Upper bound of the first wait; it doubles with every retry. 0 means no waiting.
        max_backoff_s: Largest upper bound.
        max_retry_after_s: The longest wait that a server may ask for. Told to wait longer, we wait this long and try
            again, where openai-python gives up above 120 s: a batch has the time, and the retry stays counted.
        max_disconnect_retries: Resends after a connection lost once the request was out, each of which may be billed
            again; None leaves it to `max_retries`.
        max_empty_retries: Resends after an answer with nothing in it (no choices, null content): it was paid for, and
            one resend usually helps or none does.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    max_retries: int = 10
    initial_backoff_s: float = 0.5
    max_backoff_s: float = 60.0
    max_retry_after_s: float = 600.0
    max_disconnect_retries: int | None = None
    max_empty_retries: int = 2

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("max_retries", "max_disconnect_retries", "max_empty_retries"):
            count = getattr(self, name)
            if count is not None and count < 0:
                raise ConfigError(f"{name} must be a whole number >= 0, got {count!r}; 0 turns these retries off")
        for name in ("initial_backoff_s", "max_backoff_s", "max_retry_after_s"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"{name} must be a finite number of seconds >= 0, got {seconds!r}")
        if self.max_backoff_s < self.initial_backoff_s:
            raise ConfigError(
                f"max_backoff_s must be >= initial_backoff_s ({self.initial_backoff_s:g}), got {self.max_backoff_s:g}"
            )


_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*", re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs|ns|h|m|s|d)", re.ASCII)
_SECONDS_IN = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Reads how long a failed response asks to wait.

    `retry-after-ms` and `retry-after` (seconds or a date) count alike: with both, the longer one. Without them, the
    reset of a rate limit that the response says is used up (`x-ratelimit-remaining-…: 0`).

    Args:
        headers: Response headers, looked up by lower-case name; aiohttp's mapping ignores case.
        now: Seconds since the epoch, UTC, to compare dates with.

    Returns:
        Seconds >= 0 and finite; None if the server asked for nothing that can be understood, or for a time in the past,
        which leaves the wait to the backoff.
    """
    milliseconds = _parse_number(headers.get("retry-after-ms", ""))
    value = headers.get("retry-after", "")
    seconds = _parse_number(value)
    told = [
        None if milliseconds is None else milliseconds / 1000,
        _seconds_until(value, now) if seconds is None else seconds,
    ]
    asked = [wait for wait in told if wait is not None]
    return max(asked) if asked else _rate_limit_reset(headers)


def _parse_number(text: str) -> float | None:
    match = _NUMBER.fullmatch(text)
    return _finite(float(match[1])) if match else None


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _seconds_until(date: str, now: float) -> float | None:
    try:
        parts = parsedate_tz(date)
        if parts is None:
            return None
        # An HTTP date is always in GMT, so one without a zone is too.
        wait = calendar.timegm((*parts[:6], 0, 1, 0)) - (parts[9] or 0) - now
    except (ValueError, OverflowError, IndexError, TypeError):
        return None
    return _finite(wait) if wait >= 0 else None


def _rate_limit_reset(headers: Mapping[str, str]) -> float | None:
    # Azure sends -1 for "not known", which is no reason to wait.
    waits = [
        parse_duration(headers.get(f"x-ratelimit-reset-{unit}", ""))
        for unit in ("requests", "tokens")
        if _parse_number(headers.get(f"x-ratelimit-remaining-{unit}", "")) == 0
    ]
    return max((wait for wait in waits if wait is not None), default=None)


def parse_duration(text: str) -> float | None:
    """Reads a duration as rate limit headers write it: `12ms`, `1s`, `6m0s`, `1h2m3.5s`, or bare seconds.

    Returns:
        Seconds >= 0 and finite; None if it is anything else.
    """
    bare = _parse_number(text)
    if bare is not None:
        return bare
    compact = text.strip()
    parts = _DURATION_PART.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        return None
    return _finite(sum(float(number) * _SECONDS_IN[unit] for number, unit in parts))


def backoff_delay(retry_index: int, policy: RetryPolicy, rng: random.Random) -> float:
    """Draws an exponential backoff with full jitter: anywhere from 0 to the bound, so that a herd spreads out.

    Args:
        retry_index: 0 for the first retry.
        policy: Gives the first bound and the largest.
        rng: Source of the jitter.

    Returns:
        Seconds from 0 to `min(max_backoff_s, initial_backoff_s * 2 ** retry_index)`.
    """
    bound = min(policy.max_backoff_s, policy.initial_backoff_s * 2.0 ** min(retry_index, 64))
    return rng.uniform(0.0, bound)


def next_delay(
    verdict: Verdict,
    attempts: int,
    retry_after_s: float | None,
    policy: RetryPolicy,
    rng: random.Random,
    *,
    disconnects: int = 0,
    empties: int = 0,
    remaining_s: float | None = None,
) -> float | None:
    """Decides after a failed try whether and when to send the request again.

    Args:
        verdict: On the try that just failed.
        attempts: Requests sent so far, that one included.
        retry_after_s: What the server asked for; see `parse_retry_after`.
        policy: The limits.
        rng: Source of the jitter.
        disconnects: How many of those tries ended as `DISCONNECTED`, this one included.
        empties: How many brought an answer with nothing in it, this one included.
        remaining_s: What is left of the deadline; None without one.

    Returns:
        Seconds to wait, never less than the server asked for up to `max_retry_after_s`; None to give up: it is
        permanent, the retries are used up, or the deadline would pass during the wait.
    """
    if not verdict.retryable or attempts > policy.max_retries:
        return None
    limit = policy.max_disconnect_retries
    if verdict.kind is ErrorKind.DISCONNECTED and limit is not None and disconnects > limit:
        return None
    if verdict.kind in EMPTY_KINDS and empties > policy.max_empty_retries:
        return None
    # Added to what the server asked for: all who were told the same must not come back at the same moment.
    delay = min(retry_after_s or 0.0, policy.max_retry_after_s) + backoff_delay(attempts - 1, policy, rng)
    return None if remaining_s is not None and delay >= remaining_s else delay
