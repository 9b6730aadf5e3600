"""When a run is doomed: nothing but refusals that no retry can mend, and not one answer among them."""

from __future__ import annotations

from dataclasses import dataclass

from beam_llm.errors import ErrorKind, Verdict

EVIDENCE = 20
"""Refusals without an answer between them that stop a run."""

CONNECT_GRACE_S = 10.0
"""How long an endpoint that has never answered may refuse connections: it may still be starting."""

OUTAGE_S = 300.0
"""How long an endpoint that has answered before may be out of reach; retries last about as long."""

FIRST_REQUESTS = 16
"""Open requests per process until the first answer: what a wrong key or model can cost."""

FIRST_WAIT_S = 2.0
"""After this long without a refusal the limit opens all the same: long generations are not held up."""


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

    def observe(self, verdict: Verdict, now_s: float) -> str | None:
        """Takes one verdict; returns why the run must stop, or None."""
        if verdict.stops_run:
            self.refusals += 1
            if self.refusals >= EVIDENCE:
                self.reason = f"{self.refusals} requests in a row were refused ({verdict.kind}): {verdict.message}"
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
