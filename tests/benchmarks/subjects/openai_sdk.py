"""openai-python as its users drive it: AsyncOpenAI, one coroutine a row, a semaphore, a gather.

`--transport=aiohttp` takes the SDK's own aiohttp client in place of its default one.
"""

from __future__ import annotations

import asyncio
import sys

from httpx2 import Limits
from openai import AsyncOpenAI, DefaultAioHttpClient, DefaultAsyncHttpxClient

from tests.benchmarks.subjects.job import Job, Row, in_forks, parse_job, read_rows, write_answers


async def _ask_all(job: Job, rows: list[Row], transport: str) -> list[str | None]:
    make_client = DefaultAioHttpClient if transport == "aiohttp" else DefaultAsyncHttpxClient
    limits = Limits(max_connections=job.open, max_keepalive_connections=job.open)
    semaphore = asyncio.Semaphore(job.open)
    async with AsyncOpenAI(
        base_url=job.base_url, api_key="none", max_retries=10, http_client=make_client(limits=limits)
    ) as client:

        async def ask(row: Row) -> str | None:
            async with semaphore:
                completion = await client.chat.completions.create(**row["body"])
                content: str | None = completion.choices[0].message.content
                return content

        return await asyncio.gather(*(ask(row) for row in rows))


def main() -> None:
    """Reads, forks, asks, writes."""
    transport = "httpx"
    if sys.argv[1].startswith("--transport="):
        transport = sys.argv.pop(1).partition("=")[2]
    job = parse_job()
    rows = read_rows(job)

    def ask_some(first: int, step: int) -> list[str | None]:
        return asyncio.run(_ask_all(job, rows[first::step], transport))

    write_answers(job, rows, in_forks(ask_some, job.processes))


if __name__ == "__main__":
    main()
