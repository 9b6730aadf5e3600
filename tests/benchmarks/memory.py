"""Memory with pictures of 1 MB: of a worker as rows grow, and of everything with 8,192 requests open."""

from __future__ import annotations

from tests.benchmarks import clients, inputs
from tests.benchmarks.bench import Bench, Run, Value
from tests.benchmarks.subjects.job import Job
from tests.benchmarks.waiting import OPEN, OPEN_ROWS

WORKER_SMALL = "peak memory of a worker, 2,000 rows with 1 MB images"
WORKER_LARGE = "peak memory of a worker, 20,000 rows with 1 MB images"
ALL_OPEN = "8,192 open, each with a 1 MB image: peak memory of all processes"

_PICTURE = (2400, 1800)
_PICTURES = 64
_LATENCY_MS = 2_000
_ALL_OPEN_MS = 60_000
"""So long that all 8,192 are open, even where their bodies take half a minute to send."""

_OLD_ROWS = (100, 300)
_EVERY_S = 0.2


def measure_worker_memory(bench: Bench) -> None:
    """The largest worker at 2,000 and at 20,000 rows; the old design's at sizes that fit into the memory here."""
    for measure, rows in ((WORKER_SMALL, 2_000), (WORKER_LARGE, 20_000)):
        run = _run(bench, clients.OURS, rows, clients.ours(_job(bench, rows)))
        _keep(bench, measure, clients.OURS, run.reading.peak_worker_mb, run)
    small, large = (_run(bench, clients.OLD, rows, clients.old_design(_job(bench, rows))) for rows in _OLD_ROWS)
    growth_mb = (large.reading.peak_pss_mb - small.reading.peak_pss_mb) / (_OLD_ROWS[1] - _OLD_ROWS[0])
    start_mb = small.reading.peak_pss_mb - growth_mb * _OLD_ROWS[0]
    note = f"all its processes: {growth_mb:.2f} MB a row, from {' and '.join(map(str, _OLD_ROWS))} rows"
    _keep(bench, WORKER_SMALL, clients.OLD, start_mb + growth_mb * 2_000, large, note)
    _keep(bench, ALL_OPEN, clients.OLD, start_mb + growth_mb * OPEN, large, note)


def measure_all_open(bench: Bench) -> None:
    """8,192 requests in two processes, each with a picture of 1 MB, all open at once."""
    job = _job(bench, OPEN_ROWS, base_url=bench.server.latency_url(_ALL_OPEN_MS), open_each=OPEN // 2)
    run = _run(bench, clients.OURS, OPEN_ROWS, clients.ours(job))
    all_open = [sample.pss_mb for sample in run.reading.samples if run.counts.peak_s < sample.at_s]
    bodies_gb = run.counts.body_bytes / 1e9
    note = f"{run.counts.peak:,.0f} open, {bodies_gb:.1f} GB of bodies; {all_open[0]:,.0f} MB once all were sent"
    _keep(bench, ALL_OPEN, clients.OURS, run.reading.peak_pss_mb, run, note)


def _job(bench: Bench, rows: int, *, base_url: str | None = None, open_each: int | None = None) -> Job:
    pictures = inputs.pictures(bench.folder, "1-MB", rows, _PICTURES, _PICTURE, 1000)
    file = inputs.image_rows(bench.folder, "1-MB", pictures)
    return bench.job(file, base_url=base_url or bench.server.latency_url(_LATENCY_MS), open_each=open_each)


def _run(bench: Bench, name: str, rows: int, command: list[str]) -> Run:
    return bench.run(f"{name}, {rows:,} rows of 1 MB", command, requests=rows, every_s=_EVERY_S)


def _keep(bench: Bench, measure: str, client: str, megabytes: float, run: Run, note: str = "") -> None:
    bench.keep(Value(measure, client, "MB", megabytes, megabytes, megabytes, run.command, note))
