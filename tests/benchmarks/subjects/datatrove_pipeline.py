"""datatrove's InferenceRunner against an endpoint, in local worker processes, JSONL in and out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Awaitable, Callable
from typing import Any

from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceResult, InferenceRunner
from datatrove.pipeline.writers import JsonlWriter

from tests.benchmarks.subjects.job import Job, parse_job


class _ReadShare(PipelineStep):
    """Every `world_size`-th row: its own reader shares out files, and there is one."""

    name = "Rows"
    type = "READER"

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        """Yields documents that carry the row's body."""
        with open(self._path, "rb") as lines:
            for number, line in enumerate(lines):
                if number % world_size == rank:
                    row = json.loads(line)
                    yield Document(text="-", id=row["custom_id"], metadata={"body": row["body"]})


async def _roll_out(
    document: Document, generate: Callable[[dict[str, Any]], Awaitable[InferenceResult]]
) -> InferenceResult:
    return await generate(dict(document.metadata["body"]))


def main() -> None:
    """Builds and runs the pipeline."""
    job = parse_job()
    shutil.rmtree(job.output, ignore_errors=True)  # or it would take the rows for done
    executor = LocalPipelineExecutor(
        pipeline=[_ReadShare(str(job.input)), _runner(job)],
        tasks=job.processes,
        workers=job.processes,
        logging_dir=str(job.output / "logs"),
        skip_completed=False,
    )
    executor.run()
    written = sum(1 for path in (job.output / "answers").glob("*.jsonl") for _ in path.open("rb"))
    with job.input.open("rb") as lines:
        count = sum(1 for _ in lines)
    if written != count:
        raise SystemExit(f"{count - written} of {count} rows have no answer")


def _runner(job: Job) -> InferenceRunner:
    os.environ.setdefault("OPENAI_API_KEY", "none")
    config = InferenceConfig(
        server_type="endpoint",
        model_name_or_path="m",
        endpoint_url=job.base_url.removesuffix("/v1"),
        max_concurrent_generations=job.open,
        metric_interval=3600,
    )
    return InferenceRunner(
        rollout_fn=_roll_out,
        config=config,
        output_writer=JsonlWriter(str(job.output / "answers"), compression=None),
    )


if __name__ == "__main__":
    main()
