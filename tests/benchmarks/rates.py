"""What is not sending: start-up, checking rows, taking answers from the store."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import replace

from tests.benchmarks import clients, inputs
from tests.benchmarks.bench import Bench, Run, Value, marginal, of_rounds

FIRST = "first request after start"
VALIDATE = "--validate_only, text, one process"
RERUN = "rerun of answered rows from the SQLite store"
RERUN_REQUESTS = "rerun of answered rows, requests sent"

_WORKER = "sdk_worker_main"
_EVERY_S = 0.05


def measure_start(bench: Bench) -> None:
    """From the command's start to its first request, and where that time goes."""
    job = bench.job(inputs.text_rows(bench.folder, 100))
    name = f"{clients.OURS}, first request"
    runs = [bench.run(name, clients.ours(job), requests=100, every_s=_EVERY_S) for _ in range(bench.scale.rounds)]
    command_imports_s = _import_s("pipelines.run")
    worker_imports_s = _import_s("apache_beam.runners.worker.sdk_worker_main")
    forked_s = statistics.median(_workers_start_s(run) for run in runs)
    first_s = statistics.median(run.first_request_s for run in runs)
    note = (
        f"command: imports {command_imports_s:.1f}, its checks and the job {forked_s - command_imports_s:.1f}; "
        f"workers: imports {worker_imports_s:.1f}, set-up and first batch {first_s - forked_s - worker_imports_s:.1f}"
    )
    bench.keep(of_rounds(FIRST, clients.OURS, "s", [run.first_request_s for run in runs], runs[0], note))


def _workers_start_s(run: Run) -> float:
    started = [process.started_s for process in run.reading.processes if _WORKER in process.command]
    return min(started) - run.reading.started_s


def _import_s(module: str) -> float:
    samples = []
    for _ in range(3):
        started_s = time.monotonic()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        samples.append(time.monotonic() - started_s)
    return statistics.median(samples)


def measure_validation(bench: Bench) -> None:
    """Rows read, built and checked by one worker process."""

    def command(rows: int) -> list[str]:
        job = bench.job(inputs.text_rows(bench.folder, rows))
        return clients.ours(replace(job, processes=1), "--validate_only")

    runs = {
        size: [
            bench.run(f"{clients.OURS}, --validate_only, {size:,} rows", command(size), requests=0)
            for _ in range(bench.scale.rounds)
        ]
        for size in bench.scale.rates
    }
    bench.keep(_per_second(VALIDATE, runs))


def measure_rerun(bench: Bench) -> None:
    """The same command once more: every answer comes from the store."""
    runs: dict[int, list[Run]] = {}
    for rows in bench.scale.rates:
        job = bench.job(inputs.text_rows(bench.folder, rows))
        bench.run(f"{clients.OURS}, {rows:,} rows into the store", clients.ours_with_store(job), requests=rows)
        again = clients.ours(job, store="auto")
        runs[rows] = [
            bench.run(f"{clients.OURS}, {rows:,} rows again", again, requests=0) for _ in range(bench.scale.rounds)
        ]
    bench.keep(_per_second(RERUN, runs))
    sent = [float(run.counts.requests) for done in runs.values() for run in done]
    bench.keep(of_rounds(RERUN_REQUESTS, clients.OURS, "requests", sent, runs[max(runs)][0]))


def _per_second(measure: str, runs: dict[int, list[Run]]) -> Value:
    """Rows per second of wall time, start-up apart."""
    cost = marginal(measure, clients.OURS, "rows/s", runs, lambda run: run.reading.wall_s, 1.0)
    cpu = marginal(measure, clients.OURS, "rows/s", runs, lambda run: run.reading.cpu_s, 1e6)
    note = f"{cpu.median:.0f} µs CPU a row"
    return replace(cost, median=1 / cost.median, low=1 / cost.high, high=1 / cost.low, note=note)
