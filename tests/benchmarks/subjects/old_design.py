"""The design that beam_llm replaces, written from its description.

The parent encodes all messages beforehand, with PIL, base64 and json, and forks; each worker has one asyncio loop and
one aiohttp session, makes the tasks of all its rows at once, and a semaphore lets so many of them send. The answers'
texts go back to the parent, which writes them in input order.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from contextlib import suppress
from typing import Any

import aiohttp
from PIL import Image

from tests.benchmarks.subjects.job import Job, Row, in_forks, parse_job, read_rows, write_answers

_RETRIES = 10
_WAIT_S = 3
_HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none"}


def encoded_body(row: Row, max_pixels: int | None) -> bytes:
    """The JSON of a row, its pictures as data URLs."""
    body = row["body"]
    messages = [{**message, "content": _encoded(message["content"], max_pixels)} for message in body["messages"]]
    return json.dumps({**body, "messages": messages}).encode()


def _encoded(content: Any, max_pixels: int | None) -> Any:
    if isinstance(content, str):
        return content
    return [_encoded_part(part, max_pixels) for part in content]


def _encoded_part(part: dict[str, Any], max_pixels: int | None) -> dict[str, Any]:
    if part["type"] != "image_url":
        return part
    image: Image.Image = Image.open(part["image_url"]["url"])
    kind = image.format or "PNG"
    if max_pixels is not None and image.width * image.height > max_pixels:
        scale = (max_pixels / (image.width * image.height)) ** 0.5
        image = image.resize((int(image.width * scale), int(image.height * scale)))
    buffer = io.BytesIO()
    image.save(buffer, kind)
    text = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind.lower()};base64,{text}"}}


async def _ask_all(job: Job, bodies: list[bytes]) -> list[str | None]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=1800)
    semaphore = asyncio.Semaphore(job.open)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=job.open), timeout=timeout) as session:
        return await asyncio.gather(*(_ask(session, semaphore, job.url, body) for body in bodies))


async def _ask(session: aiohttp.ClientSession, semaphore: asyncio.Semaphore, url: str, body: bytes) -> str | None:
    async with semaphore:
        for _ in range(_RETRIES):
            with suppress(aiohttp.ClientError, asyncio.TimeoutError):
                async with session.post(url, data=body, headers=_HEADERS) as response:
                    response.raise_for_status()
                    answer: str = (await response.json())["choices"][0]["message"]["content"]
                    return answer
            await asyncio.sleep(_WAIT_S)
    return None


def main() -> None:
    """Encodes, forks, asks, writes."""
    job = parse_job()
    rows = read_rows(job)
    bodies = [encoded_body(row, job.max_pixels) for row in rows]

    def ask_some(first: int, step: int) -> list[str | None]:
        return asyncio.run(_ask_all(job, bodies[first::step]))

    write_answers(job, rows, in_forks(ask_some, job.processes))


if __name__ == "__main__":
    main()
