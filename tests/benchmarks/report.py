"""A run's table and its JSON file."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from beam_llm.version import __version__
from tests.benchmarks.bars import Judgement
from tests.benchmarks.bench import Scale, Value
from tests.benchmarks.clients import PEERS_PYTHON

_PACKAGES = ("apache-beam", "aiohttp", "uvloop", "orjson", "Pillow", "pybase64")
_PEERS = ("openai", "httpx2", "httpx", "aiohttp", "litellm", "datatrove")
_VERSIONS = (
    "import json, sys; from importlib.metadata import distributions; names = sys.argv[1:];"
    "print(json.dumps({d.name: d.version for d in distributions() if d.name in names}))"
)


def table(values: Sequence[Value], judgements: Sequence[Judgement]) -> str:
    """All values, and under each measure the bars that it was held against."""
    lines = ["| measure | client | median | rounds | bar | |", "| --- | --- | ---: | --- | --- | --- |"]
    for value in sorted(values, key=lambda value: [v.measure for v in values].index(value.measure)):
        held = [j for j in judgements if (j.bar.measure, j.bar.client) == (value.measure, value.client)]
        spread = "" if value.low == value.high else f"{_short(value.low)} to {_short(value.high)}"
        bars = "; ".join(f"{_held(judgement)}" for judgement in held)
        name = f"{value.client} ({value.note})" if value.note else value.client
        met = "" if not held else "met" if all(judgement.met for judgement in held) else "MISSED"
        lines.append(f"| {value.measure} | {name} | {_short(value.median)} {value.unit} | {spread} | {bars} | {met} |")
    return "\n".join(lines)


def _held(judgement: Judgement) -> str:
    text = str(judgement.bar)
    if judgement.bar.reference is not None:
        text += f": {judgement.number:.2f}"
    return text if judgement.met else f"**{text}**"


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def write_json(path: Path, scale: Scale, values: Sequence[Value], judgements: Sequence[Judgement]) -> None:
    """Everything that is needed to read the numbers later."""
    found = {
        "scale": asdict(scale),
        "machine": machine(),
        "versions": versions(),
        "values": [asdict(value) for value in values],
        "bars": [{**asdict(j.bar), "text": str(j.bar), "number": j.number, "met": j.met} for j in judgements],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False))


def machine() -> dict[str, Any]:
    """What it ran on, and how busy that was with other things."""
    cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(int(memory[1]) * 1024 / 1e9, 1) if memory else None,
        "kernel": platform.release(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> dict[str, Any]:
    """Of the interpreter, the packages and the tools."""
    found: dict[str, Any] = {"python": platform.python_version(), "beam_llm": __version__}
    found.update((package, version(package)) for package in _PACKAGES)
    if PEERS_PYTHON.exists():
        command = [str(PEERS_PYTHON), "-c", _VERSIONS, *_PEERS]
        found["peers"] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    nginx = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True).stderr
    wrk = subprocess.run(["wrk", "-v"], capture_output=True, text=True, check=False).stdout
    return {**found, "nginx": nginx.strip(), "wrk": wrk.partition("[")[0].strip()}
