"""The floor of this library: aiohttp on uvloop posts bodies that are ready and reads the answers' bytes, no more.

The bodies are those of the first rows, over and over, so that what comes before the sending does not grow with it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import aiohttp
import uvloop

from tests.benchmarks.subjects.job import Job, in_forks, parse_job
from tests.benchmarks.subjects.original_bytes import original_body

_BODIES = 50
_HEADERS = {"Content-Type": "application/json"}


async def _post_all(job: Job, bodies: Iterator[bytes], count: int) -> int:
    turns = itertools.repeat(None, count)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def post_some() -> int:
            answered = 0
            for _ in turns:
                async with session.post(job.url, data=next(bodies), headers=_HEADERS) as response:
                    await response.read()
                    answered += response.status == 200
            return answered

        return sum(await asyncio.gather(*(post_some() for _ in range(min(job.open, count)))))


def main() -> None:
    """Posts as many bodies as the input has rows."""
    job = parse_job()
    with job.input.open("rb") as lines:
        bodies = [original_body(line) for line in itertools.islice(lines, _BODIES)]
        count = len(bodies) + sum(1 for _ in lines)

    def post_share(first: int, step: int) -> list[int]:
        share = len(range(first, count, step))
        return [uvloop.run(_post_all(job, itertools.cycle(bodies), share))]

    if (answered := sum(in_forks(post_share, job.processes))) != count:
        raise SystemExit(f"{count - answered} of {count} requests failed")


if __name__ == "__main__":
    main()
