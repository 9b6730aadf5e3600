"""Many requests open: a heavy tail of latencies, and thousands that only wait."""

from __future__ import annotations

import heapq
import itertools
import math
import random

from tests.benchmarks import clients, inputs
from tests.benchmarks.bench import Bench, Run, Value, of_rounds
from tests.benchmarks.clients import Command

TAIL = "heavy tail, time over the bound"
REACHED = "8,192 requests of 30 s, most open at once"
WAITING = "8,192 requests open, CPU while only waiting"

_SIGMA = 0.8
_CAP = 40
OPEN = 8192
OPEN_ROWS = 9000
"""More rows than may be open: they are not shared out so evenly that each process would have just its half."""

_LATENCY_MS = 30_000
_EDGE_S = 1.0
"""Left out after the last request came and before the first answer went."""


def log_normal_latencies(count: int, median_ms: int, seed: int) -> list[int]:
    """Latencies of a heavy tail, sigma 0.8, capped at 40 times the median, in ms."""
    rng = random.Random(seed)
    return [min(int(rng.lognormvariate(math.log(median_ms), _SIGMA)), _CAP * median_ms) for _ in range(count)]


def bound_ms(latencies_ms: list[int], open_requests: int) -> float:
    """No client can be done sooner."""
    return max(sum(latencies_ms) / open_requests, max(latencies_ms))


def in_order_ms(latencies_ms: list[int], open_requests: int) -> float:
    """When a client is done that costs nothing and takes the rows in their order."""
    free_at = [0.0] * min(open_requests, len(latencies_ms))
    for latency_ms in latencies_ms:
        heapq.heapreplace(free_at, free_at[0] + latency_ms)
    return max(free_at)


def reachable_latencies(count: int, median_ms: int, open_requests: int) -> tuple[int, list[int]]:
    """The first seed whose bound can be reached by taking the rows in their order, and its latencies.

    The longest of 20,000 takes longer than sum / open: a run in which it happens to start late is late whatever the
    client does. It has to stand early, and this says only that it does.
    """
    for seed in itertools.count():
        latencies_ms = log_normal_latencies(count, median_ms, seed)
        if in_order_ms(latencies_ms, open_requests) <= 1.01 * bound_ms(latencies_ms, open_requests):
            return seed, latencies_ms
    raise AssertionError("unreachable")


def measure_tail(bench: Bench) -> None:
    """Time from the first request to the last answer, over the least possible."""
    scale = bench.scale
    seed, latencies_ms = reachable_latencies(scale.tail, scale.tail_median_ms, 2 * scale.tail_open)
    least_s = bound_ms(latencies_ms, 2 * scale.tail_open) / 1000
    rows = inputs.scripted_rows(bench.folder, latencies_ms, seed)
    job = bench.job(rows, base_url=bench.server.scripted_url, open_each=scale.tail_open)
    # Once, the gather: it takes minutes, nearly all of which are waits that no other load changes.
    rounds: dict[str, tuple[Command, int]] = {
        clients.OURS: (clients.ours, scale.rounds if scale.full else 1),
        clients.GATHER: (clients.gather_per_batch, 1),
    }
    runs: dict[str, list[Run]] = {
        name: [bench.run(f"{name}, heavy tail", command(job), requests=scale.tail) for _ in range(count)]
        for name, (command, count) in rounds.items()
    }
    for name, done in runs.items():
        over = [run.sending_s / least_s for run in done]
        bench.keep(of_rounds(TAIL, name, "x", over, done[0], f"bound {least_s:.1f} s, seed {seed}"))


def measure_waiting(bench: Bench) -> None:
    """8,192 requests in two processes, all open for 30 s."""
    rows = inputs.text_rows(bench.folder, OPEN_ROWS)
    job = bench.job(rows, base_url=bench.server.latency_url(_LATENCY_MS), open_each=OPEN // 2)
    run = bench.run(f"{clients.OURS}, 8,192 open", clients.ours(job), requests=OPEN_ROWS, every_s=0.5)
    counts = run.counts
    cpu_s, wall_s = run.reading.cpu_between(counts.peak_s + _EDGE_S, counts.first_answer_s - _EDGE_S)
    bench.keep(Value(REACHED, clients.OURS, "requests", counts.peak, counts.peak, counts.peak, run.command))
    share = 100 * cpu_s / wall_s
    note = f"over {wall_s:.0f} s; all open {counts.peak_s - counts.first_s:.1f} s after the first"
    bench.keep(Value(WAITING, clients.OURS, "% of a core", share, share, share, run.command, note))
