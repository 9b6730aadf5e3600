"""Medians, marginal costs, bars, and the bound of the heavy tail."""

from __future__ import annotations

from tests.benchmarks.bars import Bar, judge
from tests.benchmarks.bench import Run, Value, marginal
from tests.benchmarks.meter import Reading
from tests.benchmarks.report import table
from tests.benchmarks.server import Counts
from tests.benchmarks.waiting import bound_ms, in_order_ms, log_normal_latencies, reachable_latencies


def run(cpu_s: float) -> Run:
    return Run("command", Reading(cpu_s=cpu_s), Counts(*[0] * 9))


def value(client: str, median: float) -> Value:
    return Value("cost", client, "µs", median, median, median)


def test_marginal_cost_leaves_start_up_out() -> None:
    runs = {1000: [run(5.0), run(9.0), run(5.1)], 3000: [run(5.2), run(5.4), run(5.5)]}
    cost = marginal("cost", "ours", "µs", runs, lambda done: done.reading.cpu_s, 1e6)
    assert round(cost.median) == 150
    assert round(cost.low) == -1800
    assert round(cost.high) == 200


def test_a_ratio_is_judged_against_its_reference() -> None:
    values = [value("ours", 3), value("theirs", 2)]
    (judgement,) = judge(values, [Bar("cost", "ours", most=1.4, reference=("cost", "theirs"))])
    assert (judgement.number, judgement.met) == (1.5, False)


def test_what_was_not_measured_is_not_judged() -> None:
    assert judge([value("ours", 3)], [Bar("cost", "ours", most=1, reference=("cost", "theirs"))]) == []


def test_a_lower_limit_is_met_from_above() -> None:
    values = [value("ours", 8192), value("theirs", 8191)]
    judged = judge(values, [Bar("cost", client, least=8192) for client in ("ours", "theirs")])
    assert [judgement.met for judgement in judged] == [True, False]


def test_the_table_names_a_missed_bar() -> None:
    values = [value("ours", 3)]
    rows = table(values, judge(values, [Bar("cost", "ours", most=2)])).splitlines()
    assert rows[-1] == "| cost | ours | 3 µs |  | **<= 2** | MISSED |"


def test_the_bound_is_the_window_or_the_longest() -> None:
    assert bound_ms([10, 10, 10, 10], 2) == 20
    assert bound_ms([10, 10, 100], 2) == 100


def test_taking_rows_in_order_can_start_the_longest_too_late() -> None:
    assert in_order_ms([10, 10, 100], 2) == 110
    assert in_order_ms([100, 10, 10], 2) == 100


def test_latencies_are_the_same_in_every_run_and_their_bound_is_within_reach() -> None:
    seed, latencies_ms = reachable_latencies(2000, 500, 200)
    assert latencies_ms == log_normal_latencies(2000, 500, seed)
    assert in_order_ms(latencies_ms, 200) <= 1.01 * bound_ms(latencies_ms, 200)
    assert sorted(latencies_ms)[1000] in range(460, 540)
