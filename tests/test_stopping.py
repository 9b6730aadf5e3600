"""When a run is doomed, and when it only looks so."""

from __future__ import annotations

import pytest

from beam_llm.errors import ErrorKind, Verdict
from beam_llm.stopping import ALIKE, CONNECT_GRACE_S, EVIDENCE, OUTAGE_S, AllAlike, StopRule

ANSWER = Verdict(None, retryable=False, message="answered")
BAD_KEY = Verdict(ErrorKind.AUTHENTICATION, retryable=False, message="Incorrect API key", stops_run=True)
NO_CONNECTION = Verdict(ErrorKind.CONNECT, retryable=True, message="refused", shrinks=True)
BAD_ROW = Verdict(ErrorKind.INVALID_REQUEST, retryable=False, message="bad row")
RATE_LIMIT = Verdict(ErrorKind.RATE_LIMIT, retryable=True, message="slow down")
TIMEOUT = Verdict(ErrorKind.TIMEOUT, retryable=True, message="too slow")
URL = "http://h/v1"
LOST = Verdict(ErrorKind.DISCONNECTED, retryable=True, message="gone")


def observe(rule: StopRule, verdict: Verdict, times: int, now_s: float = 0.0) -> str | None:
    for _ in range(times):
        rule.observe(verdict, now_s, URL)
    return rule.reason


def test_nothing_but_refusals_stop_the_run_and_say_why() -> None:
    """C15, C18, C19."""
    rule = StopRule()
    assert observe(rule, BAD_KEY, EVIDENCE - 1) is None
    reason = rule.observe(BAD_KEY, 0.0, URL)
    assert reason == f"{EVIDENCE} requests in a row were refused by http://h/v1 (authentication): Incorrect API key"
    assert rule.reason == reason


@pytest.mark.parametrize("between", [ANSWER, BAD_ROW, RATE_LIMIT, TIMEOUT, LOST])
def test_whatever_shows_a_working_endpoint_starts_the_count_anew(between: Verdict) -> None:
    rule = StopRule()
    for _ in range(5):
        assert observe(rule, BAD_KEY, EVIDENCE - 1) is None
        assert rule.observe(between, 0.0, URL) is None
    assert observe(rule, BAD_KEY, EVIDENCE) is not None


def test_a_small_share_of_refusals_never_stops_a_run() -> None:
    rule = StopRule()
    for n in range(5000):
        assert rule.observe(BAD_KEY if n % 3 else ANSWER, 0.0, URL) is None


def test_refusals_stop_a_run_that_was_answered_before() -> None:
    rule = StopRule()
    observe(rule, ANSWER, 100)
    assert observe(rule, BAD_KEY, EVIDENCE) is not None  # a key withdrawn, or a quota gone, in the middle of a run


@pytest.mark.parametrize("verdict", [BAD_ROW, RATE_LIMIT, TIMEOUT, LOST])
def test_failures_of_rows_never_stop_a_run(verdict: Verdict) -> None:
    assert observe(StopRule(), verdict, 1000, now_s=10 * OUTAGE_S) is None


@pytest.mark.parametrize(("answered", "patience_s"), [(False, CONNECT_GRACE_S), (True, OUTAGE_S)])
def test_an_endpoint_out_of_reach_stops_the_run_after_its_time(answered: bool, patience_s: float) -> None:
    rule = StopRule()
    if answered:
        rule.observe(ANSWER, 100.0, URL)
    assert observe(rule, NO_CONNECTION, 10 * EVIDENCE, now_s=100.0) is None
    assert rule.observe(NO_CONNECTION, 100.0 + patience_s - 0.1, URL) is None
    reason = rule.observe(NO_CONNECTION, 100.0 + patience_s, URL)
    assert reason == f"no connection for {patience_s:.0f} s ({10 * EVIDENCE + 2} tries): refused"


def test_few_tries_over_a_long_time_are_no_evidence() -> None:
    rule = StopRule()
    for n in range(EVIDENCE - 1):
        assert rule.observe(NO_CONNECTION, n * CONNECT_GRACE_S, URL) is None
    assert rule.observe(NO_CONNECTION, EVIDENCE * CONNECT_GRACE_S, URL) is not None


@pytest.mark.parametrize("sign_of_life", [ANSWER, BAD_ROW, RATE_LIMIT])
def test_a_sign_of_life_ends_an_outage(sign_of_life: Verdict) -> None:
    rule = StopRule()
    observe(rule, NO_CONNECTION, EVIDENCE, now_s=0.0)
    rule.observe(sign_of_life, CONNECT_GRACE_S - 1, URL)
    assert observe(rule, NO_CONNECTION, EVIDENCE, now_s=CONNECT_GRACE_S) is None
    assert observe(rule, NO_CONNECTION, 1, now_s=CONNECT_GRACE_S + OUTAGE_S) is not None


def test_tries_before_a_sign_of_life_do_not_count_after_it() -> None:
    rule = StopRule()
    observe(rule, NO_CONNECTION, EVIDENCE)
    rule.observe(RATE_LIMIT, 0.0, URL)
    observe(rule, NO_CONNECTION, EVIDENCE - 2, now_s=0.0)
    assert rule.observe(NO_CONNECTION, OUTAGE_S, URL) is None
    assert rule.observe(NO_CONNECTION, OUTAGE_S, URL) is not None


def test_refusals_and_lost_connections_do_not_add_up() -> None:
    rule = StopRule()
    observe(rule, BAD_KEY, EVIDENCE - 1)
    assert observe(rule, NO_CONNECTION, EVIDENCE - 1, now_s=OUTAGE_S) is None


def test_the_reason_stays() -> None:
    rule = StopRule()
    reason = observe(rule, BAD_KEY, EVIDENCE)
    assert rule.observe(ANSWER, 0.0, URL) == reason


HTML = Verdict(ErrorKind.INVALID_RESPONSE, retryable=True, message="the answer is not a JSON object: Please log in")
TOO_LONG = Verdict(ErrorKind.CONTEXT_LENGTH, retryable=False, message="too long")


def alike(*verdicts: Verdict, times: int = 1) -> AllAlike:
    """What comes of requests that are sent one after the other."""
    watch = AllAlike()
    for verdict in verdicts * times:
        watch.sent(1)
        watch.observe(1, verdict, "http://h/v1?key=secret")
    return watch


@pytest.mark.parametrize(
    ("verdict", "way_out"),
    [
        (BAD_ROW, "mend the rows"),
        (HTML, "check --base_url"),
        (Verdict(ErrorKind.TOO_LARGE, retryable=False, message="no"), "--image_max_bytes"),
        (Verdict(ErrorKind.NULL_CONTENT, retryable=True, message="no"), "--max_tokens"),
        (Verdict(ErrorKind.EMPTY_CHOICES, retryable=True, message="no"), "server's log"),
    ],
)
def test_first_requests_that_all_fail_alike_are_suspicious(verdict: Verdict, way_out: str) -> None:
    assert alike(verdict, times=ALIKE - 1).suspicion is None
    said = alike(verdict, times=ALIKE).suspicion
    assert said is not None
    begin = f"not one answer, and {ALIKE} requests failed alike at http://h/v1 ({verdict.kind}): {verdict.message}; "
    assert said.startswith(begin)
    assert way_out in said
    assert said.endswith("; --max_failed_ratio=1 goes on all the same")


def test_sizes_and_request_ids_make_no_difference_and_other_words_do() -> None:
    def refusals(template: str) -> AllAlike:
        messages = [template.format(n) for n in range(ALIKE)]
        return alike(*(Verdict(ErrorKind.TOO_LARGE, retryable=False, message=message) for message in messages))

    assert refusals("a body of 1,{} bytes: too large (request req_a{}f)".replace("{}", "{0}")).suspicion is not None
    assert alike(BAD_ROW, Verdict(BAD_ROW.kind, retryable=False, message="another"), times=ALIKE).suspicion is None


@pytest.mark.parametrize("passing", [RATE_LIMIT, TIMEOUT, LOST, NO_CONNECTION])
def test_failures_that_may_pass_are_no_evidence_for_or_against(passing: Verdict) -> None:
    assert alike(passing, times=10 * ALIKE).suspicion is None
    assert alike(passing, BAD_ROW, times=ALIKE).suspicion is not None


def test_an_answer_at_any_time_ends_every_suspicion() -> None:
    assert alike(ANSWER, *[BAD_ROW] * 10 * ALIKE).suspicion is None
    assert alike(*[BAD_ROW] * ALIKE, ANSWER, *[BAD_ROW] * ALIKE).suspicion is None


def test_words_of_the_model_about_rows_show_that_it_works() -> None:
    assert alike(TOO_LONG, times=10 * ALIKE).suspicion is None
    assert alike(*[BAD_ROW] * (ALIKE - 1), TOO_LONG, *[BAD_ROW] * (ALIKE - 1)).suspicion is None


def test_a_slow_request_among_the_first_is_waited_for() -> None:
    watch = AllAlike()
    watch.sent(0)
    for n in range(1, 5 * ALIKE):
        watch.sent(n)
        watch.observe(n, BAD_ROW, URL)
    assert watch.suspicion is None
    watch.sent(-1)  # not one of the first: its answer need not be waited for
    watch.observe(0, BAD_ROW, URL)
    assert watch.suspicion is not None
