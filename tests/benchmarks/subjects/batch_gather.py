"""A gather per batch, on the connections of the floor: what it costs to wait for the slowest of each batch."""

from __future__ import annotations

import asyncio

import aiohttp
import orjson
import uvloop

from tests.benchmarks.subjects.job import Job, Row, in_forks, parse_job, read_rows, write_answers


async def _ask_in_batches(job: Job, rows: list[Row]) -> list[str | None]:
    answers: list[str | None] = []
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        for start in range(0, len(rows), job.open):
            answers += await asyncio.gather(*(_ask(session, job.url, row) for row in rows[start : start + job.open]))
    return answers


async def _ask(session: aiohttp.ClientSession, url: str, row: Row) -> str | None:
    headers = {"Content-Type": "application/json"}
    async with session.post(url, data=orjson.dumps(row["body"]), headers=headers) as response:
        answer: str = orjson.loads(await response.read())["choices"][0]["message"]["content"]
        return answer


def main() -> None:
    """Reads, forks, asks, writes."""
    job = parse_job()
    rows = read_rows(job)

    def ask_some(first: int, step: int) -> list[str | None]:
        return uvloop.run(_ask_in_batches(job, rows[first::step]))

    write_answers(job, rows, in_forks(ask_some, job.processes))


if __name__ == "__main__":
    main()
