"""The command of each client that is measured."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.subjects.job import Job

Command = Callable[[Job], list[str]]
"""Makes the command that does a job; clears away what an earlier one left in its output."""

PEERS_PYTHON = Path(".cache/venv-bench/bin/python")
"""Made by `make bench`, so that no peer's dependencies meet the product's."""

OURS = "beam_llm"
OURS_STORE = "beam_llm, SQLite store"
OLD = "(a) old design"
OPENAI = "(b) openai-python"
BARE = "(c) bare aiohttp + uvloop"
WRK = "(d) wrk"
OPENAI_AIOHTTP = "(e) openai-python, its aiohttp client"
LITELLM = "(e) LiteLLM"
DATATROVE = "(e) datatrove"
GATHER = "gather per batch"


def ours(job: Job, *flags: str, store: str = "none") -> list[str]:
    """The command line as a user types it.

    Args:
        job: What to do; `output` is a folder, made anew unless there is a store to be found in it.
        flags: More flags.
        store: `--response_store`.
    """
    if store == "none":
        _clear(job.output)
    given = [f"--input={job.input}", f"--output={job.output}", f"--base_url={job.base_url}"]
    given += [f"--num_workers={job.processes}", f"--max_in_flight={job.open}", f"--response_store={store}", *flags]
    if job.max_pixels is not None:
        given += [f"--image_max_pixels={job.max_pixels}", "--image_format=jpeg"]
    return [sys.executable, "-m", "pipelines.run", *given]


def ours_with_store(job: Job) -> list[str]:
    """Ours with the store that it has by default, empty at first."""
    _clear(job.output)
    return ours(job, store="auto")


def subject(module: str, *flags: str, peer: bool = False) -> Command:
    """The command of a module of `subjects`.

    Args:
        module: Its name.
        flags: Of its own, before those of the job.
        peer: Whether it needs the peers' packages.
    """

    def command(job: Job) -> list[str]:
        _clear(job.output)
        python = str(PEERS_PYTHON) if peer else sys.executable
        return [python, "-m", f"tests.benchmarks.subjects.{module}", *flags, *job.arguments()]

    return command


def wrk(job: Job) -> list[str]:
    """wrk, which posts one body for some time: its requests are counted by the server."""
    script = job.output.with_name("post.lua")
    body = job.input.open().readline().partition('"body": ')[2].rstrip("}\n") + "}"
    script.write_text(
        f"wrk.method = 'POST'; wrk.body = [==[{body}]==]; wrk.headers['Content-Type'] = 'application/json'\n"
    )
    connections = job.processes * job.open
    return ["wrk", f"-t{job.processes}", f"-c{connections}", "-d2s", f"-s{script}", job.url]


def _clear(output: Path) -> None:
    if output.is_dir():
        shutil.rmtree(output)
    output.unlink(missing_ok=True)


old_design = subject("old_design")
bare = subject("bare")
gather_per_batch = subject("batch_gather")
openai_sdk = subject("openai_sdk", peer=True)
openai_aiohttp = subject("openai_sdk", "--transport=aiohttp", peer=True)
litellm_sdk = subject("litellm_sdk", peer=True)
datatrove_pipeline = subject("datatrove_pipeline", peer=True)
