"""Every Beam counter: its name, its unit, and what an outcome adds to it.

Beam drops counts made on any thread but a bundle's own, so everything here is called from the DoFn, with numbers that
the outcome carries.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from apache_beam.metrics import Metrics

from beam_llm.failure_examples import failure_example
from beam_llm.records import Completion, FailedRequest, Outcome

NAMESPACE = "beam_llm"

ROWS = "rows"
"""Rows read, failed ones included."""
COMPLETED = "completed"
"""Requests answered, from the server or the store."""
VALID = "valid"
"""Requests that could be sent, when nothing was to be sent (`--validate_only`)."""
FAILED = "failed"
"""Requests that got no answer; `failed_<kind>` splits them."""
REQUESTS = "requests_sent"
"""Requests sent, retries included."""
RETRIES = "retries"
"""Requests sent again; `retries_<kind>` splits them by the failure that came before."""
FROM_STORE = "from_store"
"""Answers found in the response store."""
PROMPT_TOKENS = "prompt_tokens"
"""Tokens of the prompts of answered requests, as the server counted them."""
COMPLETION_TOKENS = "completion_tokens"
"""Tokens of the answers, as the server counted them."""
NO_USAGE = "answers_without_usage"
"""Answers whose server sent no token counts."""
FINISH = "finish"
"""`finish_<reason>`: answers by finish reason."""
NOT_STORED = "answers_not_stored"
"""Answers that the response store should have kept and could not."""
ANSWERED_BY = "answered_by"
"""`answered_by_<base URL>`: answers by endpoint."""
REQUESTS_FAILED_AT = "requests_failed_at"
"""`requests_failed_at_<base URL>`: requests that failed by endpoint, those that were sent again included."""
FAILURE_EXAMPLES = "failure_examples"
"""Set of strings `<kind>: <example>`: one failure of each kind, for each copy of a step."""
THROTTLED_SECONDS = "cumulativeThrottlingSeconds"
"""Wall seconds in which requests were held back by limits, pauses and cool-downs; the name that Beam's own IOs use."""
LATENCY_MS = "latency_ms"
"""Distribution: milliseconds of the try that answered."""
REQUEST_BYTES = "request_bytes"
"""Bytes of the bodies posted, retries included."""


@lru_cache(maxsize=512)
def _counter(name: str) -> Any:
    return Metrics.counter(NAMESPACE, name)


@lru_cache(maxsize=16)
def _distribution(name: str) -> Any:
    return Metrics.distribution(NAMESPACE, name)


@lru_cache(maxsize=16)
def _string_set(name: str) -> Any:
    return Metrics.string_set(NAMESPACE, name)


def count(name: str, amount: int = 1) -> None:
    """Adds to one of the counters above."""
    if amount:
        _counter(name).inc(amount)


def record_throttled(seconds: int) -> None:
    """Counts seconds in which requests were held back, under the name that Dataflow's autoscaler reads."""
    count(THROTTLED_SECONDS, seconds)


def record_failed_tries(failures: dict[str, int]) -> None:
    """Counts requests that failed, by the base URL that they were sent to."""
    for base_url, tries in failures.items():
        count(f"{REQUESTS_FAILED_AT}_{base_url}", tries)


def record_example(failed: FailedRequest, examples: dict[str, str]) -> None:
    """Puts one failure of each kind among the job's metrics, the only place that the command sees on every runner.

    Args:
        failed: The failure.
        examples: Of the step, by kind; this one is added if it is the first of its kind. They stay few so that the
            metric stays small.
    """
    if failed.kind not in examples:
        examples[failed.kind] = f"{failed.kind}: {failure_example(failed)}"
    # Each time, as a bundle that fails takes its metrics with it.
    _string_set(FAILURE_EXAMPLES).add(examples[failed.kind])


class Tally:
    """Counts of a batch of outcomes, to be added to Beam's counters at once: each addition there takes half a
    microsecond, and an outcome has ten."""

    def __init__(self) -> None:
        self._amounts: dict[str, int] = {}

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to one of the counters above."""
        self._amounts[name] = self._amounts.get(name, 0) + amount

    def flush(self) -> None:
        """Hands everything to Beam; on the bundle's thread."""
        for name, amount in self._amounts.items():
            count(name, amount)
        self._amounts.clear()

    def record(self, outcome: Outcome) -> None:
        """Counts one outcome, and everything that went before it."""
        self.count(REQUESTS, outcome.attempts)
        self.count(REQUEST_BYTES, outcome.attempts * outcome.request_bytes)
        for kind in outcome.retried:
            self.count(RETRIES)
            self.count(f"{RETRIES}_{kind}")
        if not isinstance(outcome, Completion):
            self.count(FAILED)
            self.count(f"{FAILED}_{outcome.kind}")
            return
        self.count(COMPLETED)
        self.count(f"{FINISH}_{outcome.finish_reason or 'none'}")
        if outcome.source == "store":
            self.count(FROM_STORE)
            return
        self.count(f"{ANSWERED_BY}_{outcome.endpoint}")
        self.count(NOT_STORED, int(outcome.not_stored))
        _distribution(LATENCY_MS).update(int(outcome.latency_ms))
        self._record_usage(outcome.usage)

    def _record_usage(self, usage: dict[str, Any]) -> None:
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(prompt, int) and not isinstance(completion, int):
            self.count(NO_USAGE)
        for name, tokens in ((PROMPT_TOKENS, prompt), (COMPLETION_TOKENS, completion)):
            if isinstance(tokens, int):
                self.count(name, tokens)
