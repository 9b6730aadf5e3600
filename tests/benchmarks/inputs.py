"""Input files and pictures, the same bytes each time, kept between runs in a folder."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def text_rows(folder: Path, count: int) -> Path:
    """Short questions."""
    return _rows(folder / f"text-{count}.jsonl", count, lambda i: f"Question {i}: what is the capital of France?")


def scripted_rows(folder: Path, latencies_ms: list[int], seed: int) -> Path:
    """Short questions that tell the server how long to take."""
    file = folder / f"scripted-{len(latencies_ms)}-{seed}.jsonl"
    return _rows(file, len(latencies_ms), lambda i: f"Question {i}: latency_ms={latencies_ms[i]}")


def image_rows(folder: Path, name: str, pictures: list[Path]) -> Path:
    """A question about each picture."""

    def content(number: int) -> list[dict[str, Any]]:
        return [
            {"type": "text", "text": f"Question {number}: what is this?"},
            {"type": "image_url", "image_url": {"url": str(pictures[number])}},
        ]

    return _rows(folder / f"images-{name}-{len(pictures)}.jsonl", len(pictures), content)


def _rows(file: Path, count: int, content: Callable[[int], Any]) -> Path:
    """Lines of OpenAI's batch form."""
    with file.open("w") as out:
        for number in range(count):
            body = {"model": "m", "messages": [{"role": "user", "content": content(number)}], "max_tokens": 100}
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            out.write(json.dumps(line) + "\n")
    return file


def pictures(folder: Path, name: str, count: int, different: int, size: tuple[int, int], kilobytes: int) -> list[Path]:
    """JPEGs of about so many kilobytes: gradients under noise, made once.

    Args:
        folder: Where they are kept.
        name: Of the set.
        count: How many files. No two rows may name the same one: beam_llm keeps pictures that recur, by their path, and
            would be measured without reading and encoding them.
        different: How many of them are made; the others are hard links to these.
        size: Width and height.
        kilobytes: Of 1,000 bytes; the noise is chosen so that quality 85 gives about that.
    """
    kept = folder / name
    kept.mkdir(parents=True, exist_ok=True)
    paths = [kept / f"{number}.jpg" for number in range(count)]
    noise = 0.0
    for number, path in enumerate(paths):
        if path.exists():
            continue
        if number >= different:
            path.hardlink_to(paths[number % different])
            continue
        noise = noise or _noise_for(size, kilobytes * 1000)
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(_jpeg(number, size, noise))
        unfinished.rename(path)
    return paths


def _noise_for(size: tuple[int, int], wanted_bytes: int) -> float:
    low, high = 0.0, 128.0
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if len(_jpeg(0, size, middle)) < wanted_bytes else (low, middle)
    return high


def _jpeg(seed: int, size: tuple[int, int], noise: float) -> bytes:
    rng = np.random.default_rng(seed)
    width, height = size
    across = np.linspace(0, 1, width)[None, :, None] * rng.uniform(-120, 120, 3)
    down = np.linspace(0, 1, height)[:, None, None] * rng.uniform(-120, 120, 3)
    grain = rng.standard_normal((height, width, 1), dtype=np.float32) * noise
    pixels = np.clip(128 + across + down + grain, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
