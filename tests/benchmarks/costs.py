"""CPU per request: text and pictures."""

from __future__ import annotations

from collections.abc import Callable

from tests.benchmarks import clients, inputs
from tests.benchmarks.bench import Bench, Run, marginal, of_rounds
from tests.benchmarks.clients import Command
from tests.benchmarks.subjects.job import Job

TEXT = "text, CPU per request"
IMAGES = "images of 200 KB as they are, CPU per request"
RESIZED = "images resized to 1 MP JPEG, CPU per request"

_PICTURE = (1600, 1200)
_ONE_MEGAPIXEL = 1_000_000


def measure_text(bench: Bench) -> None:
    """Short requests, answered at once, from JSONL to JSONL."""
    scale = bench.scale
    sized: dict[str, tuple[Command, tuple[int, int]]] = {
        clients.OURS: (clients.ours, scale.text),
        clients.OLD: (clients.old_design, scale.text),
        clients.BARE: (clients.bare, scale.text),
        clients.OPENAI: (clients.openai_sdk, scale.peer),
    }
    if scale.full:
        sized[clients.OURS_STORE] = (clients.ours_with_store, scale.text)
        sized[clients.OPENAI_AIOHTTP] = (clients.openai_aiohttp, scale.peer)
        sized[clients.LITELLM] = (clients.litellm_sdk, scale.peer)
        sized[clients.DATATROVE] = (clients.datatrove_pipeline, scale.text)
    _keep_costs(bench, TEXT, sized, lambda rows: bench.job(inputs.text_rows(bench.folder, rows)), "µs", 1e6)
    job = bench.job(inputs.text_rows(bench.folder, 1))
    runs = [bench.run(clients.WRK, clients.wrk(job), requests=None) for _ in range(scale.rounds)]
    costs = [run.reading.cpu_s / run.counts.requests * 1e6 for run in runs]
    bench.keep(of_rounds(TEXT, clients.WRK, "µs", costs, runs[0]))


def measure_images(bench: Bench) -> None:
    """Pictures from disk, sent with their original bytes; the old design decodes and encodes them."""
    sized: dict[str, tuple[Command, tuple[int, int]]] = {
        clients.OURS: (clients.ours, bench.scale.image),
        clients.OLD: (clients.old_design, bench.scale.encode),
        clients.BARE: (clients.bare, bench.scale.image),
    }
    _keep_costs(bench, IMAGES, sized, lambda rows: _image_job(bench, rows), "ms", 1e3)


def measure_resizing(bench: Bench) -> None:
    """The same pictures, of 1.9 megapixels, made smaller."""
    sized: dict[str, tuple[Command, tuple[int, int]]] = {
        clients.OURS: (clients.ours, bench.scale.encode),
        clients.OLD: (clients.old_design, bench.scale.encode),
    }
    _keep_costs(bench, RESIZED, sized, lambda rows: _image_job(bench, rows, max_pixels=_ONE_MEGAPIXEL), "ms", 1e3)


def _image_job(bench: Bench, rows: int, max_pixels: int | None = None) -> Job:
    pictures = inputs.pictures(
        bench.folder, f"200-KB-{bench.scale.pictures}", rows, bench.scale.pictures, _PICTURE, 200
    )
    return bench.job(inputs.image_rows(bench.folder, "200-KB", pictures), max_pixels=max_pixels)


def _keep_costs(
    bench: Bench,
    measure: str,
    sized: dict[str, tuple[Command, tuple[int, int]]],
    make_job: Callable[[int], Job],
    unit: str,
    factor: float,
) -> None:
    for name, runs in bench.sized(sized, make_job).items():
        bench.keep(marginal(measure, name, unit, runs, _cpu_s, factor))


def _cpu_s(run: Run) -> float:
    return run.reading.cpu_s
