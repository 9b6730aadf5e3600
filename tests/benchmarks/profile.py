"""python -m tests.benchmarks.profile text: where the workers of beam_llm spend their time, by py-spy.

Counts samples of threads that hold the interpreter's lock, in worker processes, imports left out; `--all` counts those
that run without it too, such as Pillow's, but also some that only wait. Needs py-spy, beside the interpreter or on the
PATH.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.benchmarks import clients, inputs
from tests.benchmarks.bench import FULL, Bench
from tests.benchmarks.server import running_server
from tests.benchmarks.subjects.job import Job

_WORKER = "sdk_worker_main"
_IMPORTS = "_find_and_load"
_RATE_HZ = 200
_WAITS = ("wait (", "Condition.wait (", "_worker (concurrent", "_run_channel_spin", "Thread._wait_for_tstate_lock (")
"""What py-spy takes for work in threads that do none."""


def _text(bench: Bench) -> list[str]:
    return clients.ours(bench.job(inputs.text_rows(bench.folder, 120_000)))


def _store(bench: Bench) -> list[str]:
    return clients.ours_with_store(bench.job(inputs.text_rows(bench.folder, 120_000)))


def _images(bench: Bench) -> list[str]:
    return clients.ours(_image_job(bench, 6_000))


def _resizing(bench: Bench) -> list[str]:
    return clients.ours(_image_job(bench, 400, max_pixels=1_000_000))


def _image_job(bench: Bench, rows: int, max_pixels: int | None = None) -> Job:
    pictures = inputs.pictures(bench.folder, "200-KB-200", rows, 200, (1600, 1200), 200)
    return bench.job(inputs.image_rows(bench.folder, "profile", pictures), max_pixels=max_pixels)


def _validation(bench: Bench) -> list[str]:
    return clients.ours(bench.job(inputs.text_rows(bench.folder, 300_000)), "--validate_only")


JOBS: dict[str, Callable[[Bench], list[str]]] = {
    "text": _text,
    "store": _store,
    "images": _images,
    "resizing": _resizing,
    "validation": _validation,
}


def frames(stack: str) -> list[str]:
    """The functions of a collapsed stack, outermost first, with short paths and no line numbers."""
    named = (re.sub(r"\(.*/(?:site-packages|python3\.\d+)/", "(", frame) for frame in stack.split(";"))
    return [re.sub(r":\d+\)$", ")", frame) for frame in named]


def of_workers(lines: Iterable[str]) -> Iterator[tuple[list[str], int]]:
    """The stacks of worker processes and their counts, without what they import."""
    for line in lines:
        stack, _, count = line.rpartition(" ")
        named = frames(stack)
        if _WORKER in stack and _IMPORTS not in stack and not named[-1].startswith(_WAITS):
            yield named, int(count)


def summary(raw: Path, lines: int) -> str:
    """The functions with the most samples of their own, and with those that they called."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for stack, count in of_workers(raw.read_text().splitlines()):
        own[stack[-1]] += count
        whole.update(dict.fromkeys(set(stack), count))
    total = sum(own.values())

    def ranked(counter: Counter[str]) -> str:
        return "\n".join(f"{100 * count / total:5.1f} %  {name}" for name, count in counter.most_common(lines))

    return f"{total} samples\n\nself\n{ranked(own)}\n\nwith what it calls\n{ranked(whole)}"


def main() -> None:
    """Records and prints."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.profile")
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--all", action="store_true", help="count threads without the lock too")
    parser.add_argument("--lines", type=int, default=40)
    arguments = parser.parse_args()
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if spy is None:
        raise SystemExit("error: pip install py-spy")
    folder = Path(".cache/benchmarks").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / f"profile-{arguments.job}.raw"
    record = [spy, "record", "--format=raw", f"--output={raw}", f"--rate={_RATE_HZ}", "--subprocesses"]
    if not arguments.all:
        record.append("--gil")
    with running_server() as server:
        command = JOBS[arguments.job](Bench(server, folder, FULL))
        subprocess.run([*record, "--", *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(summary(raw, arguments.lines))


if __name__ == "__main__":
    main()
