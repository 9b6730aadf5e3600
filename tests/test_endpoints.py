"""The URL that each form of base URL stands for, and the choice among several endpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_llm.endpoints import (
    FAILURES,
    FIRST_COOL_DOWN_S,
    LONGEST_BEFORE_ANSWER_S,
    LONGEST_COOL_DOWN_S,
    Endpoint,
    EndpointPool,
    Lease,
    check_base_url,
    request_url,
)
from beam_llm.errors import ConfigError, ErrorKind, Verdict
from beam_llm.limits import InFlightLimit

CHAT = "/v1/chat/completions"
NOW_S = 1_000_000.0
ANSWER = Verdict(None, retryable=False, message="answered")
REFUSED = Verdict(ErrorKind.CONNECT, retryable=True, message="refused", shrinks=True)
BROKEN = Verdict(ErrorKind.SERVER_ERROR, retryable=True, message="500")
OVERLOADED = Verdict(ErrorKind.OVERLOADED, retryable=True, message="503", shrinks=True)
RATE_LIMIT = Verdict(ErrorKind.RATE_LIMIT, retryable=True, message="429")
BAD_ROW = Verdict(ErrorKind.INVALID_REQUEST, retryable=False, message="400")


class Pool(EndpointPool):
    """A pool with a limit of its own and a clock that a test sets; verdicts arrive when it says."""

    def __init__(self, *names: str, ceiling: int = 1000) -> None:
        self.limit = InFlightLimit(ceiling)
        self.now_s = NOW_S
        super().__init__([f"http://{name}" for name in names], self.limit)

    def endpoint(self, name: str) -> Endpoint:
        return next(endpoint for endpoint in self.endpoints if endpoint.base_url == f"http://{name}")

    def lease(self, avoid: str | None = None) -> Lease:
        lease = self.take(self.now_s, None if avoid is None else self.endpoint(avoid))
        assert lease is not None
        return lease

    def names(self, count: int) -> str:
        """Where the next requests go, all of them open at once."""
        leases = [self.lease() for _ in range(count)]
        for lease in leases:
            self.release(lease)
        return "".join(lease.endpoint.base_url[-1] for lease in leases)

    def end(self, lease: Lease, verdict: Verdict, retry_after_s: float | None = None) -> bool:
        paused = self.judged(lease, verdict, retry_after_s, self.now_s)
        self.release(lease)
        self.adapt(self.now_s)
        return paused

    def fail(self, name: str, verdict: Verdict, count: int = FAILURES) -> None:
        """That many requests, all open at once there, end like this."""
        leases = []
        for _ in range(count):
            self.endpoint(name).in_flight += 1
            leases.append(Lease(self.endpoint(name), self.now_s))
        for lease in leases:
            self.end(lease, verdict)


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("http://h", "http://h/v1/chat/completions"),
        ("http://h/", "http://h/v1/chat/completions"),
        ("http://h//", "http://h/v1/chat/completions"),
        ("http://h:8000/v1", "http://h:8000/v1/chat/completions"),
        ("http://h/v1/", "http://h/v1/chat/completions"),
        ("http://h/v1//", "http://h/v1/chat/completions"),
        ("http://h/v1/chat/completions", "http://h/v1/chat/completions"),
        ("http://h/v1/chat/completions/", "http://h/v1/chat/completions"),
        ("http://h/v1beta/openai/", "http://h/v1beta/openai/chat/completions"),
        ("http://h/api/v1/", "http://h/api/v1/chat/completions"),
        ("http://h/api/v3", "http://h/api/v3/chat/completions"),
        ("https://h/openai/deployments/d?api-version=x", "https://h/openai/deployments/d/chat/completions?api-version=x"),
        ("https://h/d/chat/completions?api-version=x", "https://h/d/chat/completions?api-version=x"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1/chat/completions"),
        ("http://h/a%2Fb", "http://h/a%2Fb/chat/completions"),
    ],
)  # fmt: skip
def test_each_form_of_base_url_means_one_url(base_url: str, url: str) -> None:
    """C41: no double slash, no second /v1, nothing added behind a path that the user gave but the route."""
    assert request_url(base_url, CHAT) == url


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("/v1/chat/completions", "http://h/v1/chat/completions"),
        ("v1/chat/completions", "http://h/v1/chat/completions"),
        ("/chat/completions", "http://h/v1/chat/completions"),
        ("/v1/completions", "http://h/v1/completions"),
    ],
)
def test_each_form_of_path_means_one_url(path: str, url: str) -> None:
    assert request_url("http://h/v1", path) == url
    assert request_url("http://h", path) == url


@pytest.mark.parametrize(
    ("given", "checked"),
    [(" http://h/v1\n", "http://h/v1"), ("https://h", "https://h"), ("HTTP://h", "HTTP://h")],
)
def test_a_usable_base_url_loses_its_outer_white_space_only(given: str, checked: str) -> None:
    assert check_base_url(given) == checked


@pytest.mark.parametrize(
    "base_url", ["", "localhost:8000", "h/v1", "ftp://h", "http://", "http:///v1", "http://:80", "http://[::1", "http://h:x/"]
)  # fmt: skip
def test_what_is_no_address_is_refused_with_an_example(base_url: str) -> None:
    with pytest.raises(ConfigError, match=r"must be an http\(s\) URL such as http://localhost:8000/v1"):
        check_base_url(base_url)


@pytest.mark.parametrize("base_url", ["http://user:sk-canary@h:1/v1", "https://sk-canary@h", "ftp://u:sk-canary@h"])
def test_a_key_in_the_base_url_is_refused_without_showing_it(base_url: str) -> None:
    """C88: the message names the host and the remedy, not the key."""
    with pytest.raises(ConfigError, match="api_key_env") as caught:
        check_base_url(base_url)
    assert "canary" not in str(caught.value)
    assert "…@h" in str(caught.value)


def test_equals_take_turns() -> None:
    assert Pool(*"abc").names(6) == "abcabc"


def test_one_after_the_other_uses_every_endpoint() -> None:
    pool = Pool(*"ab")
    assert "".join(pool.names(1) for _ in range(4)) == "abab"


def test_the_endpoint_with_the_fewest_open_requests_is_next() -> None:
    pool = Pool(*"ab")
    for lease in [pool.lease() for _ in range(6)]:
        if lease.endpoint.base_url == "http://b":
            pool.release(lease)
    assert [pool.lease().endpoint.base_url for _ in range(3)] == ["http://b"] * 3
    assert sorted(endpoint.in_flight for endpoint in pool.endpoints) == [3, 3]


def test_a_single_endpoint_is_always_taken() -> None:
    pool = Pool("a")
    assert pool.names(3) == "aaa"
    assert (pool.endpoints[0].in_flight, pool.endpoints[0].requests) == (0, 3)


def test_an_endpoint_knows_its_urls() -> None:
    endpoint = Pool("a/v1/").endpoints[0]
    assert endpoint.url(CHAT) == endpoint.url(CHAT) == "http://a/v1/chat/completions"
    assert endpoint.url("/v1/completions") == "http://a/v1/completions"


def test_a_retry_prefers_another_endpoint_even_a_busier_one() -> None:
    pool = Pool(*"ab")
    pool.endpoint("b").in_flight = 7
    assert pool.lease(avoid="a").endpoint is pool.endpoint("b")
    assert pool.lease().endpoint is pool.endpoint("a")


def test_a_retry_goes_to_the_only_endpoint_again() -> None:
    assert Pool("a").lease(avoid="a").endpoint.base_url == "http://a"


def test_tries_and_failures_are_counted_for_each_endpoint() -> None:
    pool = Pool(*"ab")
    pool.end(pool.lease(), ANSWER)
    pool.end(pool.lease(), BAD_ROW)
    pool.end(pool.lease(), ANSWER)
    counts = {endpoint.base_url[-1]: (endpoint.requests, endpoint.failures) for endpoint in pool.endpoints}
    assert counts == {"a": (2, 0), "b": (1, 1)}


@pytest.mark.parametrize("verdict", [REFUSED, BROKEN, OVERLOADED])
def test_failures_in_a_row_take_an_endpoint_out_until_a_single_probe_gets_through(verdict: Verdict) -> None:
    pool = Pool(*"abc")
    pool.fail("a", verdict, FAILURES - 1)
    assert "a" in pool.names(3)
    pool.fail("a", verdict, 1)
    assert "a" not in pool.names(9)
    pool.now_s += FIRST_COOL_DOWN_S
    leases = [pool.lease() for _ in range(6)]
    probes = [lease for lease in leases if lease.endpoint is pool.endpoint("a")]
    assert len(probes) == 1
    pool.end(probes[0], ANSWER)
    assert pool.names(2) == "aa"  # the others still have open requests


@pytest.mark.parametrize("verdict", [ANSWER, BAD_ROW, RATE_LIMIT])
def test_a_sign_of_life_between_failures_starts_the_count_anew(verdict: Verdict) -> None:
    pool = Pool(*"ab")
    for _ in range(3):
        pool.fail("a", BROKEN, FAILURES - 1)
        pool.fail("a", verdict, 1)
    assert "a" in pool.names(2)


@pytest.mark.parametrize(("answered", "longest_s"), [(True, LONGEST_COOL_DOWN_S), (False, LONGEST_BEFORE_ANSWER_S)])
def test_cool_downs_double_up_to_the_longest(answered: bool, longest_s: float) -> None:
    pool, waits = Pool("a"), []
    if answered:
        pool.end(pool.lease(), ANSWER)
    pool.fail("a", REFUSED)
    for _ in range(12):
        wait_s = pool.opens_in_s(pool.now_s)
        assert wait_s is not None
        assert pool.take(pool.now_s + 0.99 * wait_s) is None
        assert pool.limit.maximum == 0
        pool.now_s += wait_s
        pool.adapt(pool.now_s)
        assert pool.limit.maximum == 1
        waits.append(wait_s)
        pool.end(pool.lease(), REFUSED)
    assert waits == pytest.approx([min(longest_s, FIRST_COOL_DOWN_S * 2**n) for n in range(12)])


def test_an_answer_ends_the_growth_of_cool_downs() -> None:
    pool = Pool("a")
    for _ in range(2):
        pool.fail("a", REFUSED)
        assert pool.opens_in_s(pool.now_s) == pytest.approx(FIRST_COOL_DOWN_S)
        pool.now_s += FIRST_COOL_DOWN_S
        pool.end(pool.lease(), ANSWER)


def test_failures_of_requests_sent_before_a_cool_down_say_nothing_new() -> None:
    pool = Pool("a")
    before = [pool.lease() for _ in range(500)]
    pool.now_s += 1
    pool.fail("a", REFUSED)
    for lease in before:
        pool.end(lease, REFUSED)
    assert pool.opens_in_s(pool.now_s) == pytest.approx(FIRST_COOL_DOWN_S)


@pytest.mark.parametrize("verdict", [BROKEN, OVERLOADED])
def test_with_nowhere_else_to_go_an_endpoint_that_answers_with_errors_stays_in_use(verdict: Verdict) -> None:
    pool = Pool(*"ab")
    for _ in range(20):
        pool.fail("a", verdict)
        pool.fail("b", verdict)
        assert pool.take(pool.now_s) is not None
    assert sum(endpoint.is_open(pool.now_s) for endpoint in pool.endpoints) == 1


def test_a_probe_that_is_given_up_makes_way_for_the_next() -> None:
    pool = Pool("a")
    pool.fail("a", REFUSED)
    pool.now_s += FIRST_COOL_DOWN_S
    probe = pool.lease()
    assert pool.take(pool.now_s) is None
    pool.release(probe)
    assert pool.take(pool.now_s) is not None


def test_reaching_an_endpoint_that_was_out_of_reach_is_enough() -> None:
    """Its answer may take minutes; the others need not wait for it."""
    pool = Pool("a")
    pool.fail("a", REFUSED)
    pool.now_s += FIRST_COOL_DOWN_S
    probe = pool.lease()
    pool.endpoint("a").reached(probe)
    pool.adapt(pool.now_s)
    assert pool.names(3) == "aaa"
    assert pool.limit.maximum > 900


def test_reaching_an_endpoint_that_answered_with_errors_is_not_enough() -> None:
    pool = Pool(*"ab")
    pool.fail("a", BROKEN)
    pool.now_s += FIRST_COOL_DOWN_S
    pool.endpoint("a").reached(pool.lease())
    assert pool.names(3) == "bbb"


@pytest.mark.parametrize("verdict", [RATE_LIMIT, OVERLOADED])
def test_retry_after_pauses_the_endpoint_for_every_request(verdict: Verdict) -> None:
    pool = Pool(*"ab")
    first, second = pool.lease(), pool.lease()
    assert pool.end(first, verdict, 20.0)
    assert pool.names(4) == "bbbb"
    assert pool.end(second, verdict, 5.0)
    assert (pool.take(pool.now_s + 4.9), pool.opens_in_s(pool.now_s), pool.limit.maximum) == (None, 5.0, 0)
    pool.now_s += 5
    pool.adapt(pool.now_s)
    assert pool.names(4) == "bbbb"
    assert pool.limit.maximum > 900
    pool.now_s += 15
    assert sorted(pool.names(4)) == [*"aabb"]


def test_a_shorter_pause_does_not_end_a_longer_one() -> None:
    pool = Pool("a")
    leases = [pool.lease() for _ in range(3)]
    for lease, wait_s in zip(leases, (5.0, 30.0, 5.0), strict=True):
        pool.end(lease, RATE_LIMIT, wait_s)
    assert pool.opens_in_s(pool.now_s) == 30.0


@pytest.mark.parametrize(("verdict", "wait_s"), [(RATE_LIMIT, 0.9), (RATE_LIMIT, None), (BROKEN, 30.0)])
def test_what_is_no_word_about_the_endpoint_pauses_only_the_request(verdict: Verdict, wait_s: float | None) -> None:
    pool = Pool("a")
    assert not pool.end(pool.lease(), verdict, wait_s)
    assert pool.take(pool.now_s) is not None


def test_a_slow_replica_shrinks_its_own_share_only() -> None:
    pool = Pool(*"ab", ceiling=100)
    for _ in range(12):
        pool.now_s += 1
        for _ in range(10):
            pool.end(pool.lease(), ANSWER)
        pool.fail("a", RATE_LIMIT, 100)
    leases = [pool.lease() for _ in range(90)]
    assert sum(lease.endpoint is pool.endpoint("a") for lease in leases) < 20
    assert pool.limit.maximum == 100


def test_the_limit_of_the_process_shrinks_with_its_only_endpoint_and_grows_back() -> None:
    pool, seen = Pool("a", ceiling=100), []
    for second in range(80):
        pool.now_s += 1
        pool.fail("a", OVERLOADED if second < 10 else ANSWER, 40)
        seen.append(pool.limit.maximum)
    assert seen[9] < 5
    assert seen[-1] == 100
    assert not pool.strained


def test_what_is_still_open_at_a_paused_endpoint_takes_no_room_from_the_others() -> None:
    pool = Pool(*"ab", ceiling=100)
    at_a = [lease for lease in [pool.lease() for _ in range(60)] if lease.endpoint is pool.endpoint("a")]
    pool.end(at_a[0], RATE_LIMIT, 60.0)
    for second in range(8):
        pool.now_s = NOW_S + 1 + second
        pool.fail("b", OVERLOADED, 100)
    b = pool.endpoint("b")
    assert b.share.allowed(100) < 30
    assert pool.limit.maximum == len(at_a) - 1 + max(b.in_flight, b.share.allowed(100))


VERDICTS = (ANSWER, REFUSED, BROKEN, OVERLOADED, RATE_LIMIT, BAD_ROW)


@given(st.lists(st.tuples(st.sampled_from(VERDICTS), st.floats(0, 3), st.booleans()), max_size=150), st.integers(1, 3))
def test_whatever_happens_room_comes_back_and_the_limit_says_so(
    events: list[tuple[Verdict, float, bool]], endpoints: int
) -> None:
    """No dead end: whenever nothing is open and no endpoint has room, one opens within a known time."""
    pool, leases = Pool(*"abc"[:endpoints], ceiling=8), list[Lease]()
    for verdict, gap_s, take in events:
        pool.now_s += gap_s
        pool.adapt(pool.now_s)
        if take and sum(e.in_flight for e in pool.endpoints) < pool.limit.maximum:
            leases.append(pool.lease())
        elif leases:
            pool.end(leases.pop(0), verdict, 7.0 if verdict is RATE_LIMIT else None)
    for lease in leases:
        pool.release(lease)
    pool.adapt(pool.now_s)
    if pool.take(pool.now_s) is None:
        wait_s = pool.opens_in_s(pool.now_s)
        assert wait_s is not None
        assert 0 < wait_s <= LONGEST_COOL_DOWN_S
        pool.now_s += wait_s
        pool.adapt(pool.now_s)
        assert pool.limit.maximum >= 1
        pool.lease()
