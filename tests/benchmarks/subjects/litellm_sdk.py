"""LiteLLM's acompletion, one coroutine a row, a semaphore, a gather."""

from __future__ import annotations

import asyncio
import os

from tests.benchmarks.subjects.job import Job, Row, in_forks, parse_job, read_rows, write_answers

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network at import


async def _ask_all(job: Job, rows: list[Row]) -> list[str | None]:
    import litellm  # in the worker: it holds state that a fork would break

    semaphore = asyncio.Semaphore(job.open)

    async def ask(row: Row) -> str | None:
        async with semaphore:
            fields = {**row["body"], "model": f"openai/{row['body']['model']}"}
            completion = await litellm.acompletion(**fields, api_base=job.base_url, api_key="none", num_retries=10)
            content: str | None = completion.choices[0].message.content
            return content

    return await asyncio.gather(*(ask(row) for row in rows))


def main() -> None:
    """Reads, forks, asks, writes."""
    job = parse_job()
    rows = read_rows(job)

    def ask_some(first: int, step: int) -> list[str | None]:
        return asyncio.run(_ask_all(job, rows[first::step]))

    write_answers(job, rows, in_forks(ask_some, job.processes))


if __name__ == "__main__":
    main()
