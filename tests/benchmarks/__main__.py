"""python -m tests.benchmarks: measures, prints a table, writes a JSON file. `make bench` and `make bench-full` run it.

The exit code is 0 whether or not a bar was met: a busy machine misses some.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.benchmarks import costs, memory, rates, waiting
from tests.benchmarks.bars import judge
from tests.benchmarks.bench import FULL, SHORT, Bench
from tests.benchmarks.clients import PEERS_PYTHON
from tests.benchmarks.report import table, write_json
from tests.benchmarks.server import running_server
from tests.benchmarks.tools import ensure_tools

MEASURES: dict[str, Callable[[Bench], None]] = {
    "text": costs.measure_text,
    "images": costs.measure_images,
    "start": rates.measure_start,
    "tail": waiting.measure_tail,
    "resizing": costs.measure_resizing,
    "validation": rates.measure_validation,
    "rerun": rates.measure_rerun,
    "waiting": waiting.measure_waiting,
    "memory": memory.measure_worker_memory,
    "all_open": memory.measure_all_open,
}
_SHORT = ("text", "images", "start", "tail")
"""What fits into four minutes."""


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("--full", action="store_true", help="all measures, large sizes, five rounds")
    parser.add_argument("--only", metavar="NAME[,NAME]", help=f"of {', '.join(MEASURES)}")
    parser.add_argument("--rounds", type=int, help="instead of 3, or 5 with --full")
    arguments = parser.parse_args()
    scale = FULL if arguments.full else SHORT
    if arguments.rounds is not None:
        scale = replace(scale, rounds=arguments.rounds)
    names = arguments.only.split(",") if arguments.only else list(MEASURES) if arguments.full else list(_SHORT)
    if unknown := set(names) - set(MEASURES):
        parser.error(f"unknown measure {', '.join(sorted(unknown))}")
    ensure_tools()
    if not PEERS_PYTHON.exists():
        raise SystemExit(f"error: {PEERS_PYTHON} is missing: `make bench` makes it")
    _allow_descriptors()
    folder = Path(".cache/benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    with running_server() as server:
        bench = Bench(server, folder.resolve(), scale)
        for name in names:
            started_s = time.monotonic()
            print(f"{name}:", file=sys.stderr)
            MEASURES[name](bench)
            print(f"  in {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    judgements = judge(bench.values)
    result = Path("out", f"{scale.name}.json")
    write_json(result, scale, bench.values, judgements)
    print(table(bench.values, judgements))
    print(f"\n{sum(j.met for j in judgements)} of {len(judgements)} bars met; all numbers: {result}")


def _allow_descriptors() -> None:
    """As many open files as the system lets us have: the server and the clients inherit that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
