"""One run of the benchmark: commands under a meter, side by side, round after round."""

from __future__ import annotations

import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.clients import Command
from tests.benchmarks.meter import Reading, run_metered
from tests.benchmarks.server import Counts, Server
from tests.benchmarks.subjects.job import Job


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `SHORT` and `FULL` are the two there are.

    Args:
        name: Of the form.
        rounds: How often each command is run; medians are taken.
        text, peer: Two sizes each: the cost of a request is the difference of their medians over the
            difference of the sizes, so that start-up does not count. `peer` is for clients whose request costs
            milliseconds.
        pictures: How many different ones are made; each row names a file of its own.
        image, encode: Two sizes for clients that send pictures as they are, and that decode and encode them.
        tail, tail_open, tail_median_ms: Requests of the heavy tail, how many are open in each process, median latency.
        rates: Two sizes for rows per second.
        full: Whether the clients that take long are measured too.
        text_open: Requests open in each process.
    """

    name: str
    rounds: int
    text: tuple[int, int]
    peer: tuple[int, int]
    pictures: int
    image: tuple[int, int]
    encode: tuple[int, int]
    tail: int
    tail_open: int
    tail_median_ms: int
    rates: tuple[int, int]
    full: bool
    text_open: int = 1000


SHORT = Scale(
    "bench",
    rounds=3,
    text=(2_000, 22_000),
    peer=(300, 900),
    pictures=200,
    image=(100, 3_000),
    encode=(20, 160),
    tail=2_400,
    tail_open=200,
    tail_median_ms=300,
    rates=(5_000, 40_000),
    full=False,
)
FULL = Scale(
    "bench-full",
    rounds=5,
    text=(20_000, 60_000),
    peer=(1_000, 5_000),
    pictures=2_000,
    image=(400, 2_000),
    encode=(100, 500),
    tail=20_000,
    tail_open=1_000,
    tail_median_ms=1_000,
    rates=(20_000, 100_000),
    full=True,
)


@dataclass(frozen=True, slots=True)
class Run:
    """A command that has done its job, and what the server saw of it."""

    command: str
    reading: Reading
    counts: Counts

    @property
    def first_request_s(self) -> float:
        """From the command's start to its first request."""
        return self.counts.first_s - self.reading.started_s

    @property
    def sending_s(self) -> float:
        """From its first request to its last answer."""
        return self.counts.last_answer_s - self.counts.first_s


@dataclass(frozen=True, slots=True)
class Value:
    """What one client came to in one measure.

    Args:
        measure, client: Names.
        unit: Of the numbers.
        median: The number that counts.
        low, high: Between which the rounds lay.
        command: One of those that were run.
        note: What else the runs showed.
    """

    measure: str
    client: str
    unit: str
    median: float
    low: float
    high: float
    command: str = ""
    note: str = ""


@dataclass(slots=True)
class Bench:
    """Runs commands against one server and keeps the values that come of them.

    Args:
        server: What they talk to.
        folder: For input, output and logs; kept between runs.
        scale: How much.
    """

    server: Server
    folder: Path
    scale: Scale
    values: list[Value] = field(default_factory=list)

    def job(
        self, file: Path, *, base_url: str | None = None, open_each: int | None = None, max_pixels: int | None = None
    ) -> Job:
        """A job for two processes with an output of its own."""
        url = base_url or self.server.base_url
        return Job(url, file, self.folder / "output", open=open_each or self.scale.text_open, max_pixels=max_pixels)

    def run(self, name: str, command: list[str], *, requests: int | None, every_s: float = 0.0) -> Run:
        """Runs one command and checks that it did its work.

        Args:
            name: For the log and the progress line.
            command: What to run.
            requests: How many the server must have seen, once each; None = any number.
            every_s: Seconds between samples of memory and CPU; 0 = none.
        """
        self.server.reset()
        reading = run_metered(command, self.folder / "run.log", every_s)
        run = Run(shlex.join(command), reading, self.server.counts())
        print(f"  {name}: {reading.cpu_s:.2f} s CPU, {reading.wall_s:.2f} s", file=sys.stderr)
        if requests is not None and (run.counts.requests, run.counts.answers) != (requests, requests):
            raise RuntimeError(f"{name}: the server saw {run.counts}, not {requests} requests: {run.command}")
        return run

    def sized(
        self,
        clients: Mapping[str, tuple[Command, tuple[int, int]]],
        make_job: Callable[[int], Job],
        requests: Callable[[int], int] = lambda size: size,
    ) -> dict[str, dict[int, list[Run]]]:
        """Runs every client at its two sizes, round after round, so that all meet the same machine.

        Args:
            clients: Name -> command and sizes.
            make_job: The job of so many rows.
            requests: What the server must see of it.
        """
        runs: dict[str, dict[int, list[Run]]] = {name: defaultdict(list) for name in clients}
        for _ in range(self.scale.rounds):
            for name, (command, sizes) in clients.items():
                for size in sizes:
                    done = self.run(f"{name}, {size:,} rows", command(make_job(size)), requests=requests(size))
                    runs[name][size].append(done)
        return runs

    def keep(self, value: Value) -> None:
        """Adds a value to the results."""
        self.values.append(value)


def of_rounds(measure: str, client: str, unit: str, samples: Sequence[float], run: Run, note: str = "") -> Value:
    """The value whose samples were taken one a round."""
    return Value(measure, client, unit, statistics.median(samples), min(samples), max(samples), run.command, note)


def marginal(
    measure: str, client: str, unit: str, runs: Mapping[int, list[Run]], of: Callable[[Run], float], factor: float
) -> Value:
    """What one row more costs: the difference of the medians at two sizes over the difference of the sizes.

    Args:
        measure, client, unit: Of the value.
        runs: Size -> runs, one a round.
        of: What is compared, such as CPU seconds.
        factor: From its unit to that of the value.
    """
    small, large = sorted(runs)
    middle = statistics.median(map(of, runs[large])) - statistics.median(map(of, runs[small]))
    pairs = [of(b) - of(a) for a, b in zip(runs[small], runs[large], strict=True)]
    scale = factor / (large - small)
    return Value(measure, client, unit, middle * scale, min(pairs) * scale, max(pairs) * scale, runs[large][0].command)
