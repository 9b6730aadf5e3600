"""The end of a run: counters to a Summary, its one line, its JSON, its exit code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from apache_beam.metrics import MetricsFilter

from beam_llm import metrics
from beam_llm.errors import ErrorKind

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_TOO_MANY_FAILURES = 0, 1, 2, 3

_HOPELESS = frozenset(
    {ErrorKind.AUTHENTICATION, ErrorKind.PERMISSION, ErrorKind.NOT_FOUND, ErrorKind.QUOTA, ErrorKind.CONNECT}
)
"""Kinds that say something of the run, not of a row, when nothing else comes back."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of a run.

    Args:
        counters: Every counter of `beam_llm.metrics` by name; a missing one is 0.
        seconds: From the start of the pipeline to its end.
        validated: Nothing was to be sent.
        latency_ms: Mean, least and most of the tries that answered.
        examples: A failure of each kind, where the runner tells; see `failure_examples`.
    """

    counters: Mapping[str, int]
    seconds: float
    validated: bool = False
    latency_ms: Mapping[str, float] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)

    def count(self, name: str) -> int:
        """A counter's value."""
        return self.counters.get(name, 0)

    def by(self, prefix: str) -> dict[str, int]:
        """Counters `<prefix>_<what>` by what, the largest first."""
        found = {name[len(prefix) + 1 :]: n for name, n in self.counters.items() if name.startswith(f"{prefix}_")}
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    @property
    def finished(self) -> int:
        """Rows with a record."""
        return self.count(metrics.COMPLETED) + self.count(metrics.FAILED) + self.count(metrics.VALID)

    def exit_code(self, max_failed_ratio: float) -> int:
        """0 done; 1 nothing answered and every reason speaks against the whole run; 3 more failures than allowed."""
        failed = self.count(metrics.FAILED)
        kinds = set(self.by(metrics.FAILED))
        if failed and not self.count(metrics.COMPLETED) and not self.validated and kinds <= _HOPELESS:
            return EXIT_FAILED
        if failed > max_failed_ratio * max(1, self.finished):
            return EXIT_TOO_MANY_FAILURES
        return EXIT_DONE

    def failure_lines(self) -> list[str]:
        """Why rows failed: a line for each kind with an example, the most frequent kind first."""
        return [
            f"{n:,} failed ({kind}), for example {self.examples[kind]}"
            if kind in self.examples
            else f"{n:,} failed ({kind})"
            for kind, n in self.by(metrics.FAILED).items()
        ]

    def line(self) -> str:
        """The last line of standard error."""
        kinds = ", ".join(f"{kind} {n:,}" for kind, n in self.by(metrics.FAILED).items())
        failed = f"{self.count(metrics.FAILED):,} failed" + (f" ({kinds})" if kinds else "")
        rows, rate = self.finished, self.seconds or 1
        if self.validated:
            good = self.count(metrics.VALID)
            return f"{rows:,} rows: {good:,} can be sent, {failed}; nothing was sent; {self.seconds:.1f} s"
        sent = self.count(metrics.REQUESTS)
        parts = [f"{rows:,} rows: {self.count(metrics.COMPLETED):,} completed, {failed}"]
        for reason, n in self.by(metrics.FINISH).items():
            if reason not in ("stop", "tool_calls"):
                parts.append(f"{n:,} with finish_reason {reason}")
        if stored := self.count(metrics.FROM_STORE):
            parts.append(f"{stored:,} from the store")
        if lost := self.count(metrics.NOT_STORED):
            parts.append(f"{lost:,} answers NOT stored, a rerun asks them again")
        parts.append(f"{sent:,} requests sent, {self.count(metrics.RETRIES):,} retries")
        tokens = self.count(metrics.PROMPT_TOKENS), self.count(metrics.COMPLETION_TOKENS)
        parts.append(f"{tokens[0]:,} + {tokens[1]:,} tokens")
        parts.append(f"{self.seconds:.1f} s, {sent / rate:,.1f} requests/s")
        return "; ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """For `summary.json`."""
        return {
            "rows": self.finished,
            "completed": self.count(metrics.COMPLETED),
            "failed": self.count(metrics.FAILED),
            "failed_by_kind": self.by(metrics.FAILED),
            "failed_examples": dict(self.examples),
            "finish_reasons": self.by(metrics.FINISH),
            "from_store": self.count(metrics.FROM_STORE),
            "requests_sent": self.count(metrics.REQUESTS),
            "retries": self.count(metrics.RETRIES),
            "retries_by_kind": self.by(metrics.RETRIES),
            "prompt_tokens": self.count(metrics.PROMPT_TOKENS),
            "completion_tokens": self.count(metrics.COMPLETION_TOKENS),
            "answers_not_stored": self.count(metrics.NOT_STORED),
            "answers_without_usage": self.count(metrics.NO_USAGE),
            "answered_by": self.by(metrics.ANSWERED_BY),
            "requests_failed_at": self.by(metrics.REQUESTS_FAILED_AT),
            "throttled_seconds": self.count(metrics.THROTTLED_SECONDS),
            "request_bytes": self.count(metrics.REQUEST_BYTES),
            "latency_ms": dict(self.latency_ms),
            "seconds": round(self.seconds, 3),
        }


def summarise(result: Any, seconds: float, *, validated: bool = False) -> Summary:
    """The summary of a finished Beam run.

    Args:
        result: What `pipeline.run()` returned.
        seconds: How long it took.
        validated: Whether nothing was to be sent.
    """
    found = result.metrics().query(MetricsFilter().with_namespace(metrics.NAMESPACE))
    counters: dict[str, int] = {}
    for counter in found["counters"]:
        name = counter.key.metric.name
        counters[name] = counters.get(name, 0) + (counter.result or 0)
    latency = {}
    for distribution in found["distributions"]:
        if distribution.key.metric.name == metrics.LATENCY_MS and distribution.result.count:
            value = distribution.result
            latency = {"mean": round(value.mean, 1), "min": value.min, "max": value.max}
    return Summary(counters, seconds, validated, latency, _examples(found))


def _examples(found: Mapping[str, Any]) -> dict[str, str]:
    """One failure of each kind; none from runners that know no sets of strings, such as Dataflow in Beam 2.77."""
    texts = sorted({text for metric in found.get("string_sets", ()) for text in metric.result or ()})
    return {kind: example for kind, _, example in (text.partition(": ") for text in reversed(texts))}
