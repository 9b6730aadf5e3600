"""When a run is doomed: nothing but refusals that no retry can mend, and not one answer among them."""

from __future__ import annotations

from dataclasses import dataclass, field

from beam_llm.errors import ErrorKind, Verdict

EVIDENCE = 20
"""Refusals without an answer between them that stop a run."""

ALIKE = 100
"""First requests of a process that must all have failed alike for the run to be suspected of failing as a whole."""

CONNECT_GRACE_S = 10.0
"""How long an endpoint that has never answered may refuse connections: it may still be starting."""

OUTAGE_S = 300.0
"""How long an endpoint that has answered before may be out of reach; retries last about as long."""

FIRST_REQUESTS = 16
"""Open requests per process until the first answer: what a wrong key or model can cost."""

FIRST_WAIT_S = 2.0
"""After this long without a refusal the limit opens all the same: long generations are not held up."""

_WAYS_OUT = {
    # Kinds that are about one row as a rule, but about the run when every row gets the same words. Not among them:
    # context_length and content_filter, with which a model shows that it works.
    ErrorKind.INVALID_REQUEST: "mend the rows, the model's name or the parameters",
    ErrorKind.TOO_LARGE: "lower --image_max_bytes or --image_max_side, or raise the server's limit",
    ErrorKind.INVALID_RESPONSE: "check --base_url: something else may be answering in the endpoint's place",
    ErrorKind.EMPTY_CHOICES: "read the server's log",
    ErrorKind.NULL_CONTENT: "read the server's log, and raise --max_tokens if the model thinks first",
}

_PASSING = frozenset(
    {
        ErrorKind.RATE_LIMIT,
        ErrorKind.OVERLOADED,
        ErrorKind.SERVER_ERROR,
        ErrorKind.TIMEOUT,
        ErrorKind.CONNECT,
        ErrorKind.DISCONNECTED,
        ErrorKind.DEADLINE,
    }
)
"""Failures that say nothing of what an answer would have been."""


@dataclass(slots=True)
class StopRule:
    """Counts verdicts; `reason` is set once the run cannot succeed.

    A refusal is what `Verdict.stops_run` marks: bad key, no permission, unknown model, quota gone, a parameter that
    the model rejects. An answer, or a failure of another kind that shows a working endpoint, starts the count anew, so
    a small share of permanent failures never stops a run. Endpoints out of reach count by time, not by number.
    """

    answered: bool = False
    reason: str | None = None
    refusals: int = 0
    _unreachable_since_s: float | None = None
    _unreachable: int = 0

    def observe(self, verdict: Verdict, now_s: float, base_url: str) -> str | None:
        """Takes the verdict of an endpoint; returns why the run must stop, or None."""
        if verdict.stops_run:
            self.refusals += 1
            if self.refusals >= EVIDENCE:
                by = without_query(base_url)
                self.reason = (
                    f"{self.refusals} requests in a row were refused by {by} ({verdict.kind}): {verdict.message}"
                )
        elif verdict.kind is ErrorKind.CONNECT:
            self._observe_unreachable(verdict, now_s)
        else:
            self.answered = self.answered or verdict.kind is None
            self.refusals = self._unreachable = 0
            self._unreachable_since_s = None
        return self.reason

    def _observe_unreachable(self, verdict: Verdict, now_s: float) -> None:
        if self._unreachable_since_s is None:
            self._unreachable_since_s = now_s
        self._unreachable += 1
        silent_s = now_s - self._unreachable_since_s
        if self._unreachable >= EVIDENCE and silent_s >= (OUTAGE_S if self.answered else CONNECT_GRACE_S):
            self.reason = f"no connection for {silent_s:.0f} s ({self._unreachable} tries): {verdict.message}"


@dataclass(slots=True)
class AllAlike:
    """Watches a process's first requests; `suspicion` is set while all of them have failed alike.

    It is no proof, since rows may be sorted, and other processes may get answers, or a store may hold some: who sees
    the whole run decides. A slow answer is waited for: every request that was sent among the first `ALIKE` must have
    come back. An answer, or words about the row, end the suspicion; failures that may pass do not count.
    """

    suspicion: str | None = None
    _over: bool = False
    _sent: int = 0
    _failed: int = 0
    _open: dict[int, int] = field(default_factory=dict)
    _kind: ErrorKind | None = None
    _gist: str = ""

    def sent(self, request: int) -> None:
        """A request, known by a number of its own while it is open, goes out."""
        if not self._over:
            self._sent += 1
            self._open[request] = self._sent

    def observe(self, request: int, verdict: Verdict, base_url: str) -> None:
        """Takes the verdict on it."""
        if self._over:
            return
        self._open.pop(request, None)
        if verdict.kind is None:
            self._over, self.suspicion = True, None
            self._open.clear()
        elif verdict.kind not in _PASSING:
            self._count(verdict.kind, _gist(verdict.message))
            oldest = next(iter(self._open.values()), self._sent)
            if self.suspicion is None and self._failed >= ALIKE <= oldest:
                self.suspicion = (
                    f"not one answer, and {self._failed} requests failed alike at {without_query(base_url)} "
                    f"({verdict.kind}): {verdict.message}; {_WAYS_OUT[verdict.kind]}; "
                    "--max_failed_ratio=1 goes on all the same"
                )

    def _count(self, kind: ErrorKind, gist: str) -> None:
        if (kind, gist) != (self._kind, self._gist):
            self._kind, self._gist, self._failed, self.suspicion = kind, gist, 0, None
        self._failed += kind in _WAYS_OUT


def without_query(base_url: str) -> str:
    """The base URL as it may be shown: some services are given a key in the query."""
    return base_url.partition("?")[0]


def _gist(message: str) -> str:
    """The message without what differs from one request to the next: sizes, positions, request ids."""
    return " ".join(word for word in message.split() if not any(c.isdigit() for c in word))
