"""Runs `python -m pipelines.run` as a process of its own and reads back all that it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
PROC = Path("/proc")

Record = dict[str, Any]
T = TypeVar("T")

_MARK = "BEAM_LLM_TEST_RUN"
"""An environment variable that every process of a run inherits: how its processes are found, whatever they become."""

_QUIET = {"PYTHONWARNINGS": "ignore::FutureWarning"}
"""Google's packages warn at import that they will leave the oldest Python behind: true, and not of this command."""

_WORKER = b"\0-m\0apache_beam.runners.worker.sdk_worker_main\0"

_OF_THE_CALLER = re.compile(r"(OPENAI_|BEAM_LLM_|https?_proxy$|all_proxy$)", re.IGNORECASE)
"""Variables of whoever runs the tests that would change what the command does."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended, and its output folder.

    Args:
        code: Its exit code; negative = the signal that killed it.
        stderr: All that it and its workers wrote there.
        seconds: From its start to its end.
        output: Its `--output`.
    """

    code: int
    stderr: str
    seconds: float
    output: Path

    @property
    def lines(self) -> list[str]:
        """Lines of standard error that are not blank."""
        return [line for line in self.stderr.splitlines() if line.strip()]

    @property
    def completed(self) -> list[Record]:
        """The records of all `completed-*` shards."""
        return self._records("completed")

    @property
    def failed(self) -> list[Record]:
        """The records of all `failed-*` shards."""
        return self._records("failed")

    @property
    def invalid(self) -> list[Record]:
        """The records of all `invalid-*` shards, which `--validate_only` writes."""
        return self._records("invalid")

    @property
    def validation(self) -> Record:
        """`validation.json`, which `--validate_only` writes."""
        found: Record = json.loads((self.output / "validation.json").read_text(encoding="utf-8"))
        return found

    @property
    def summary(self) -> Record:
        """`summary.json`."""
        found: Record = json.loads((self.output / "summary.json").read_text(encoding="utf-8"))
        return found

    def shards(self, name: str = "") -> list[Path]:
        """The shards of one output, or of both."""
        return sorted(self.output.glob(f"{name}*-of-*.jsonl"))

    def _records(self, name: str) -> list[Record]:
        return [json.loads(line) for shard in self.shards(name) for line in shard.read_bytes().splitlines()]


class Command:
    """A command that runs. Ends with the `with` block, together with every process that it started.

    Args:
        output: Its `--output`.
        flags: All other flags.
        env: Variables added to the environment.
        stderr: A descriptor for standard error, such as a terminal's; None = a file that `wait` reads.
    """

    def __init__(
        self, output: Path, *flags: str, env: Mapping[str, str] | None = None, stderr: int | None = None
    ) -> None:
        self.output = output
        self._mark = uuid.uuid4().hex
        self._started_s = time.monotonic()
        self._log = output.with_name(f"{output.name}.stderr")
        inherited = {name: value for name, value in os.environ.items() if not _OF_THE_CALLER.match(name)}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.run", f"--output={output}", *flags],
                cwd=ROOT,
                env={**inherited, **_QUIET, **(env or {}), _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log if stderr is None else stderr,
                start_new_session=True,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self.process.pid, *self.processes()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def stderr(self) -> str:
        """What has been written so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout_s: float = 60) -> Finished:
        """Waits for its end.

        Raises:
            TimeoutError: It still runs after `timeout_s`; with what it wrote to standard error.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still running after {timeout_s:g} s; standard error:\n{self.stderr}") from None
        return Finished(code, self.stderr, time.monotonic() - self._started_s, self.output)

    def processes(self) -> list[int]:
        """The ids of all processes of the run that are alive: the command, its workers, a simulator. Linux only."""
        mark = f"{_MARK}={self._mark}".encode()
        return [pid for pid in _process_ids() if mark in _read(pid, "environ").split(b"\0")]

    def workers(self) -> list[int]:
        """The ids of its Beam worker processes."""
        return [pid for pid in self.processes() if _WORKER in self.command_line(pid)]

    def command_line(self, pid: int) -> bytes:
        """A process's arguments, joined by NUL; empty once it has ended."""
        return _read(pid, "cmdline")


def run(
    output: Path, *flags: str, timeout_s: float = 60, env: Mapping[str, str] | None = None, code: int | None = None
) -> Finished:
    """Runs the command to its end.

    Args:
        output, flags, env: As for `Command`.
        timeout_s: Longest time that it may take.
        code: The exit code that it must have; None = any.
    """
    with Command(output, *flags, env=env) as command:
        done = command.wait(timeout_s)
    assert code is None or done.code == code, f"exit code {done.code} instead of {code}; standard error:\n{done.stderr}"
    return done


def write_lines(path: Path, *rows: Any) -> Path:
    """A JSONL file; rows may be bytes, taken as they are, or values. Returns its path."""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def request(custom_id: str | None, content: Any, **fields: Any) -> Record:
    """A line of the `openai_batch` format; without an id if that is None."""
    line: Record = {} if custom_id is None else {"custom_id": custom_id}
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return {**line, "method": "POST", "url": "/v1/chat/completions", "body": body}


def picture_part(path: Path) -> Record:
    """A message part that refers to a picture."""
    return {"type": "image_url", "image_url": {"url": str(path)}}


def ids(records: list[Record]) -> list[str]:
    """The sorted `custom_id`s."""
    return sorted(record["custom_id"] for record in records)


def answer_of(record: Record) -> Any:
    """The text of an `openai_batch` result."""
    return record["response"]["body"]["choices"][0]["message"]["content"]


def wait_until(condition: Callable[[], T], timeout_s: float, what: str) -> T:
    """Asks again and again until the answer is true, and returns it.

    Args:
        condition: What to ask.
        timeout_s: For how long.
        what: Its name, for the error.

    Raises:
        TimeoutError: It never was.
    """
    give_up_s = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"no {what} within {timeout_s:g} s")
        time.sleep(0.02)
    return answer


def _process_ids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:  # it has ended
        return b""
