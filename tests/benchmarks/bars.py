"""What is asked of beam_llm, and whether a run meets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks import clients, costs, memory, rates, waiting
from tests.benchmarks.bench import Value
from tests.benchmarks.clients import OURS


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit for what one client comes to.

    Args:
        measure, client: Whose value is judged.
        most, least: What it may be; one of them is given.
        reference: (measure, client) that the value is divided by; None = the value itself is judged.
    """

    measure: str
    client: str
    most: float | None = None
    least: float | None = None
    reference: tuple[str, str] | None = None

    def __str__(self) -> str:
        limit = f"<= {self.most:g}" if self.least is None else f">= {self.least:,g}"
        if self.reference is None:
            return limit
        measure, client = self.reference
        return f"{limit} x {client if measure == self.measure else f'that of {measure!r}'}"

    def allows(self, number: float) -> bool:
        """Whether a number, or a ratio, is within the limit."""
        return (self.most is None or number <= self.most) and (self.least is None or number >= self.least)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A bar and what was held against it."""

    bar: Bar
    number: float
    met: bool


def _beside(measure: str, reference: str, most: float, client: str = OURS) -> Bar:
    return Bar(measure, client, most=most, reference=(measure, reference))


BARS = (
    _beside(costs.TEXT, clients.OLD, 1.0),
    _beside(costs.TEXT, clients.BARE, 1.4),
    _beside(costs.TEXT, clients.OPENAI, 0.1),
    _beside(costs.TEXT, clients.OLD, 1.5, client=clients.OURS_STORE),
    Bar(waiting.TAIL, OURS, most=1.15),
    _beside(costs.IMAGES, clients.OLD, 0.1),
    _beside(costs.IMAGES, clients.BARE, 2.0),
    _beside(costs.RESIZED, clients.OLD, 0.7),
    Bar(memory.WORKER_SMALL, OURS, most=600),
    Bar(memory.WORKER_LARGE, OURS, most=600),
    Bar(memory.WORKER_LARGE, OURS, most=1.1, reference=(memory.WORKER_SMALL, OURS)),
    Bar(waiting.REACHED, OURS, least=8192),
    Bar(waiting.WAITING, OURS, most=10),
    Bar(memory.ALL_OPEN, OURS, most=1000),
    Bar(rates.RERUN_REQUESTS, OURS, most=0),
    Bar(rates.RERUN, OURS, least=10_000),
    Bar(rates.FIRST, OURS, most=5),
    Bar(rates.VALIDATE, OURS, least=20_000),
)


def judge(values: Sequence[Value], bars: Sequence[Bar] = BARS) -> list[Judgement]:
    """Holds every bar that has been measured against its number."""
    medians = {(value.measure, value.client): value.median for value in values}
    judgements = []
    for bar in bars:
        needed = [(bar.measure, bar.client), *([bar.reference] if bar.reference else [])]
        if all(key in medians for key in needed):
            number = medians[needed[0]] / (medians[needed[1]] if bar.reference else 1)
            judgements.append(Judgement(bar, number, bar.allows(number)))
    return judgements
