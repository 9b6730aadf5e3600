"""The end of a run: counters to a line, to JSON and to an exit code."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import orjson
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from beam_llm import metrics
from beam_llm.dofn import OutcomeCounts
from beam_llm.errors import ErrorKind
from beam_llm.records import Completion, FailedRequest, Outcome
from beam_llm.runner import settle_runner
from beam_llm.summary import EXIT_DONE, EXIT_FAILED, EXIT_TOO_MANY_FAILURES, Summary, summarise

RUN = {
    "rows": 1500,
    "completed": 1490,
    "failed": 10,
    "failed_bad_image": 3,
    "failed_context_length": 3,
    "failed_timeout": 4,
    "finish_stop": 1400,
    "finish_length": 90,
    "requests_sent": 1600,
    "retries": 110,
    "retries_rate_limit": 100,
    "retries_timeout": 10,
    "prompt_tokens": 1_234_567,
    "completion_tokens": 2000,
    "from_store": 7,
}


def summary(seconds: float = 20.0, validated: bool = False, **counters: int) -> Summary:
    return Summary(counters, seconds, validated)


def test_the_line_tells_rows_failures_requests_tokens_and_speed() -> None:
    assert Summary(RUN, 20.0).line() == (
        "1,500 rows: 1,490 completed, 10 failed (timeout 4, bad_image 3, context_length 3); "
        "90 with finish_reason length; 7 from the store; "
        "1,600 requests sent, 110 retries; 1,234,567 + 2,000 tokens; 20.0 s, 80.0 requests/s"
    )


def test_the_line_of_a_run_without_rows_or_time_holds() -> None:
    line = summary(seconds=0.0).line()
    assert line == "0 rows: 0 completed, 0 failed; 0 requests sent, 0 retries; 0 + 0 tokens; 0.0 s, 0.0 requests/s"


def test_the_line_of_a_validation_says_that_nothing_was_sent() -> None:
    checked = summary(2.0, True, valid=8, failed=2, failed_bad_input=2)
    assert checked.line() == "10 rows: 8 can be sent, 2 failed (bad_input 2); nothing was sent; 2.0 s"


def test_json_splits_every_sum_and_books_balance() -> None:
    found = orjson.loads(orjson.dumps(Summary(RUN, 20.0004, latency_ms={"mean": 1.5}).as_dict()))
    assert found["rows"] == found["completed"] + found["failed"] == 1500
    assert found["failed_by_kind"] == {"timeout": 4, "bad_image": 3, "context_length": 3}
    assert next(iter(found["failed_by_kind"])) == "timeout"
    assert found["finish_reasons"] == {"stop": 1400, "length": 90}
    assert found["retries_by_kind"] == {"rate_limit": 100, "timeout": 10}
    assert (found["requests_sent"], found["retries"], found["from_store"]) == (1600, 110, 7)
    assert (found["latency_ms"], found["seconds"], found["answers_without_usage"]) == ({"mean": 1.5}, 20.0, 0)


def test_each_kind_of_failure_has_a_line_with_an_example_where_there_is_one() -> None:
    """The runner of some clusters gives no examples back."""
    assert Summary(RUN, 20.0, examples={"timeout": "r1: late", "bad_image": "r2: gone"}).failure_lines() == [
        "4 failed (timeout), for example r1: late",
        "3 failed (bad_image), for example r2: gone",
        "3 failed (context_length)",
    ]
    assert summary(completed=3).failure_lines() == []


@pytest.mark.parametrize(
    ("counters", "allowed", "code"),
    [
        ({}, 0.0, EXIT_DONE),
        ({"completed": 10}, 0.0, EXIT_DONE),
        ({"completed": 9, "failed": 1, "failed_timeout": 1}, 0.0, EXIT_TOO_MANY_FAILURES),
        ({"completed": 9, "failed": 1, "failed_timeout": 1}, 0.1, EXIT_DONE),
        ({"completed": 89, "failed": 11, "failed_timeout": 11}, 0.1, EXIT_TOO_MANY_FAILURES),
        ({"failed": 5, "failed_timeout": 5}, 1.0, EXIT_DONE),
        ({"failed": 5, "failed_authentication": 5}, 1.0, EXIT_FAILED),
        ({"failed": 5, "failed_connect": 3, "failed_quota": 2}, 0.0, EXIT_FAILED),
        ({"failed": 5, "failed_authentication": 4, "failed_bad_input": 1}, 0.0, EXIT_TOO_MANY_FAILURES),
        ({"completed": 1, "failed": 5, "failed_authentication": 5}, 0.0, EXIT_TOO_MANY_FAILURES),
    ],
)
def test_exit_code_follows_from_failures_and_their_kinds(counters: dict[str, int], allowed: float, code: int) -> None:
    assert Summary(counters, 20.0).exit_code(allowed) == code


def test_a_validation_is_judged_by_its_bad_rows() -> None:
    assert summary(1.0, True, valid=5).exit_code(0.0) == EXIT_DONE
    assert summary(1.0, True, valid=5, failed=1, failed_bad_input=1).exit_code(0.0) == EXIT_TOO_MANY_FAILURES


class _Record(beam.DoFn):
    def setup(self) -> None:
        self._counted = OutcomeCounts()

    def process(self, outcome: Outcome) -> Any:
        self._counted.add(outcome)
        self._counted.flush()
        metrics.record_failed_tries({"u": 1} if isinstance(outcome, FailedRequest) else {})
        return ()


def test_a_real_run_is_summed_up_over_all_its_steps() -> None:
    """C07, C89: every try is counted; tokens are those of answers, and answers without any are counted too."""
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    body = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}
    twice = (ErrorKind.SERVER_ERROR, ErrorKind.RATE_LIMIT)
    first: list[Outcome] = [
        Completion(
            "a", {**body, "usage": usage}, attempts=3, latency_ms=10.4, endpoint="u", retried=twice, request_bytes=100
        ),
        Completion("b", {**body, "usage": None}, latency_ms=30, endpoint="u", request_bytes=50, not_stored=True),
        Completion("c", {**body, "usage": usage}, attempts=0, source="store"),
    ]
    second: list[Outcome] = [
        FailedRequest(
            "d",
            ErrorKind.TIMEOUT,
            "late",
            attempts=2,
            retried=(ErrorKind.TIMEOUT,),
            request_bytes=10,
            endpoint="http://u",
        ),
        FailedRequest("e", ErrorKind.BAD_INPUT, "bad"),
        FailedRequest("f", ErrorKind.BAD_INPUT, "also bad"),
    ]
    options = PipelineOptions(["--num_workers=1"])
    settle_runner(options)
    pipeline = beam.Pipeline(options=options)
    for name, outcomes in (("First", first), ("Second", second)):
        _ = pipeline | name >> beam.Create(outcomes) | f"Record{name}" >> beam.ParDo(_Record())
    result = pipeline.run()
    result.wait_until_finish()

    found = summarise(result, 1.5)
    assert found.as_dict() == {
        "rows": 6,
        "completed": 3,
        "failed": 3,
        "failed_by_kind": {"bad_input": 2, "timeout": 1},
        "failed_examples": {"bad_input": "e: bad", "timeout": "d (http://u): late"},
        "finish_reasons": {"stop": 3},
        "from_store": 1,
        "requests_sent": 6,
        "retries": 3,
        "retries_by_kind": {"rate_limit": 1, "server_error": 1, "timeout": 1},
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "answers_not_stored": 1,
        "answers_without_usage": 1,
        "answered_by": {"u": 2},
        "requests_failed_at": {"u": 3},
        "throttled_seconds": 0,
        "request_bytes": 370,
        "latency_ms": {"mean": 20.0, "min": 10, "max": 30},
        "seconds": 1.5,
    }
    assert not found.validated
