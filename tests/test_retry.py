"""When and how a request is tried again."""

from __future__ import annotations

import math
import random
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_llm.errors import ConfigError, ErrorKind, Verdict
from beam_llm.retry import RetryPolicy, backoff_delay, next_delay, parse_duration, parse_retry_after

NOW = 1_790_000_000.0
NO_BACKOFF = RetryPolicy(initial_backoff_s=0, max_backoff_s=0)
TRANSIENT = Verdict(ErrorKind.SERVER_ERROR, retryable=True, message="m")
DISCONNECTED = Verdict(ErrorKind.DISCONNECTED, retryable=True, message="m")
PERMANENT = Verdict(ErrorKind.INVALID_REQUEST, retryable=False, message="m")


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3),
        ({"retry-after": " 0.503 "}, 0.503),
        ({"retry-after": "0"}, 0),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "1"}, 1),
        ({"retry-after-ms": "2500", "retry-after": "2"}, 2.5),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2),
        ({"retry-after": formatdate(NOW + 3, usegmt=True)}, 3),
        ({"retry-after": formatdate(NOW + 3, usegmt=True).removesuffix(" GMT")}, 3),
        ({"retry-after": formatdate(NOW + 3, usegmt=True).replace("GMT", "+0100")}, None),
        ({"retry-after": formatdate(NOW - 3, usegmt=True)}, None),
        ({"retry-after": "Mon, 99 Foo 9999 99:99:99 GMT"}, None),
        *(({"retry-after": absurd}, None) for absurd in ("", "-1", "nan", "inf", "1_0", "9" * 400, "soon", "٣")),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 360),
        ({"x-ratelimit-remaining-requests": "5", "x-ratelimit-reset-requests": "6m0s"}, None),
        ({"x-ratelimit-remaining-tokens": "-1", "x-ratelimit-reset-tokens": "6m0s"}, None),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "1s", "retry-after": "20"}, 20),
    ],
)
def test_retry_after_is_read_in_every_form(headers: dict[str, str], wait_s: float | None) -> None:
    """C23, C24."""
    assert parse_retry_after(headers, NOW) == (None if wait_s is None else pytest.approx(wait_s))


@given(st.text(), st.text(), st.floats(0, 1e11))
def test_retry_after_of_any_text_is_none_or_a_finite_wait(value: str, milliseconds: str, now: float) -> None:
    wait_s = parse_retry_after({"retry-after": value, "retry-after-ms": milliseconds}, now)
    assert wait_s is None or (math.isfinite(wait_s) and wait_s >= 0)


WORDS = ("Wed,", "31", "-1", "Feb", "2026", "99999999999", "07:28:00", "99:99", "GMT", "+9999", "-", "AM", "0")


@given(st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_anything_like_a_date_is_none_or_a_finite_wait(value: str) -> None:
    wait_s = parse_retry_after({"retry-after": value}, NOW)
    assert wait_s is None or (math.isfinite(wait_s) and wait_s >= 0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("12ms", 0.012), ("1s", 1), ("6m0s", 360), ("1h2m3.5s", 3723.5), ("1d", 86400), ("500µs", 5e-4), ("2.5", 2.5)]
    + [(text, None) for text in ("", "s", "1x", "1m 2", "-1s", "1e3s", "2026-01-01T00:00:00Z", "9" * 400 + "s")],
)
def test_duration_of_rate_limit_headers(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == (None if seconds is None else pytest.approx(seconds))


@given(st.integers(0, 10_000), st.floats(0, 100), st.floats(0, 1000), st.integers())
def test_backoff_stays_within_its_bound(index: int, initial_s: float, more_s: float, seed: int) -> None:
    policy = RetryPolicy(initial_backoff_s=initial_s, max_backoff_s=initial_s + more_s)
    delay = backoff_delay(index, policy, random.Random(seed))
    assert 0 <= delay <= min(policy.max_backoff_s, initial_s * 2.0 ** min(index, 900))


def test_backoff_doubles_up_to_the_largest_and_uses_the_whole_range() -> None:
    rng = random.Random(1)
    policy = RetryPolicy(initial_backoff_s=1, max_backoff_s=4)
    for index, bound in enumerate((1, 2, 4, 4)):
        delays = [backoff_delay(index, policy, rng) for _ in range(500)]
        assert min(delays) < 0.05 * bound
        assert 0.95 * bound < max(delays) <= bound


@pytest.mark.parametrize(
    ("verdict", "attempts", "told_s", "keywords", "policy", "delay_s"),
    [
        (TRANSIENT, 1, None, {}, {}, 0),
        (TRANSIENT, 1, 7, {}, {}, 7),
        (PERMANENT, 1, 7, {}, {}, None),
        (TRANSIENT, 3, None, {}, {"max_retries": 3}, 0),
        (TRANSIENT, 4, None, {}, {"max_retries": 3}, None),
        (TRANSIENT, 1, None, {}, {"max_retries": 0}, None),
        (TRANSIENT, 1, 5000, {}, {"max_retry_after_s": 600}, 600),
        (TRANSIENT, 1, 7, {"remaining_s": 8}, {}, 7),
        (TRANSIENT, 1, 7, {"remaining_s": 7}, {}, None),
        (TRANSIENT, 1, None, {"remaining_s": -1}, {}, None),
        (DISCONNECTED, 2, None, {"disconnects": 2}, {}, 0),
        (DISCONNECTED, 2, None, {"disconnects": 1}, {"max_disconnect_retries": 1}, 0),
        (DISCONNECTED, 2, None, {"disconnects": 2}, {"max_disconnect_retries": 1}, None),
        (TRANSIENT, 3, None, {"disconnects": 2}, {"max_disconnect_retries": 1}, 0),
    ],
)
def test_next_delay_waits_as_told_or_gives_up(
    verdict: Verdict,
    attempts: int,
    told_s: float | None,
    keywords: dict[str, Any],
    policy: dict[str, Any],
    delay_s: float | None,
) -> None:
    given_policy = RetryPolicy(initial_backoff_s=0, max_backoff_s=0, **policy)
    assert next_delay(verdict, attempts, told_s, given_policy, random.Random(1), **keywords) == delay_s


def test_requests_told_the_same_wait_do_not_come_back_together() -> None:
    rng = random.Random(1)
    policy = RetryPolicy(initial_backoff_s=1, max_backoff_s=60)
    delays = [next_delay(TRANSIENT, 1, 30.0, policy, rng) for _ in range(50)]
    assert len(set(delays)) == len(delays)
    assert all(delay is not None and 30 <= delay <= 31 for delay in delays)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_retries", -1),
        ("max_retries", 1.5),
        ("max_retries", True),
        ("max_retries", None),
        ("max_disconnect_retries", -1),
        ("initial_backoff_s", -0.1),
        ("initial_backoff_s", math.nan),
        ("max_backoff_s", math.inf),
        ("max_backoff_s", 0.1),
        ("max_retry_after_s", "60"),
    ],
)
def test_policy_refuses_what_cannot_work(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} must be .*got"):
        RetryPolicy(**{field: value})
