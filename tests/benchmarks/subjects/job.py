"""What every client that stands beside ours is told, and how it reads its rows and shares them among processes."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a client.

    Args:
        base_url: With /v1.
        input: JSONL in OpenAI's batch form.
        output: JSONL to write.
        processes: How many send.
        open: Requests open at once in each of them.
        max_pixels: Larger pictures are made smaller; None = as they are.
    """

    base_url: str
    input: Path
    output: Path
    processes: int = 2
    open: int = 1000
    max_pixels: int | None = None

    @property
    def url(self) -> str:
        """Where chat completions are asked for."""
        return f"{self.base_url}/chat/completions"

    def arguments(self) -> list[str]:
        """The command line that `parse_job` reads."""
        given = [f"--base_url={self.base_url}", f"--input={self.input}", f"--output={self.output}"]
        given += [f"--processes={self.processes}", f"--open={self.open}"]
        return given if self.max_pixels is None else [*given, f"--max_pixels={self.max_pixels}"]


def parse_job() -> Job:
    """The job that this process's command line describes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base_url", required=True)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--open", type=int, default=1000)
    parser.add_argument("--max_pixels", type=int)
    return Job(**vars(parser.parse_args()))


def read_rows(job: Job) -> list[Row]:
    """All rows of the input."""
    with job.input.open("rb") as lines:
        return [json.loads(line) for line in lines]


def write_answers(job: Job, rows: list[Row], answers: list[str | None]) -> None:
    """One line a row, in input order.

    Raises:
        SystemExit: A row has no answer: a client that drops work is not measured.
    """
    with job.output.open("w") as file:
        for row, answer in zip(rows, answers, strict=True):
            file.write(json.dumps({"custom_id": row["custom_id"], "answer": answer}) + "\n")
    if missing := sum(answer is None for answer in answers):
        raise SystemExit(f"{missing} of {len(answers)} rows have no answer")


def in_forks(work: Callable[[int, int], list[Any]], processes: int) -> list[Any]:
    """Runs `work(first, step)` in a pool of forked processes, each for every `processes`-th row.

    Children see all that the parent has in memory: what `work` closes over is never pickled.

    Returns:
        The results in row order.
    """
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, initializer=_keep, initargs=(work,)) as pool:
        parts = pool.starmap(_work, [(first, processes) for first in range(processes)], chunksize=1)
    merged: list[Any] = [None] * sum(len(part) for part in parts)
    for first, part in enumerate(parts):
        merged[first::processes] = part
    return merged


_kept: list[Callable[[int, int], list[Any]]] = []


def _keep(work: Callable[[int, int], list[Any]]) -> None:
    _kept.append(work)


def _work(first: int, step: int) -> list[Any]:
    return _kept[0](first, step)
