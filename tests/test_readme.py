"""What the README shows is run: its commands, its Python, its tables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from beam_llm.errors import ErrorKind
from beam_llm.flags import ChatOptions, parse_flags
from beam_llm.simulator import SimulatorProcess

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


PIPELINES = [block for block in blocks("sh") if "pipelines.run" in block]
PYTHON = blocks("python")


@pytest.fixture(scope="module")
def simulator() -> Iterator[SimulatorProcess]:
    with SimulatorProcess() as running:
        yield running


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder as a user has it: the project's pipelines, and some data."""
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    (tmp_path / "data").mkdir()
    row = {
        "custom_id": "a",
        "body": {"messages": [{"role": "user", "content": "hello"}]},
        "url": "/v1/chat/completions",
    }
    (tmp_path / "data" / "a.jsonl").write_bytes(orjson.dumps(row))
    return tmp_path


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=170,
    )


def test_make_demo_runs_the_sample_and_shows_where_the_answers_are() -> None:
    assert "make demo" in blocks("sh")[0]
    done = run(["make", "-o", ".venv/.demo", "demo", f"BIN={Path(sys.executable).parent}"], ROOT)
    assert done.returncode == 0, done.stderr
    assert "200 rows: 200 completed, 0 failed" in done.stderr
    assert "out/demo" in done.stdout
    summary = json.loads((ROOT / "out/demo/summary.json").read_text())
    assert (summary["completed"], summary["exit_code"]) == (200, 0)


def test_make_test_runs_the_linters_and_pytest_and_is_what_ci_runs() -> None:
    steps = run(["make", "-n", "-o", ".venv/.test", "test"], ROOT).stdout
    assert all(tool in steps for tool in ("ruff check", "ruff format --check", "mypy", "-m pytest"))
    assert "make test" in blocks("sh")[1]
    assert "\nmake test" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("command", PIPELINES, ids=[f"command {i}" for i in range(len(PIPELINES))])
def test_each_command_line_does_what_it_says(command: str, simulator: SimulatorProcess, place: Path) -> None:
    line = command.replace("http://localhost:8000/v1", simulator.base_url)
    done = run(["sh", "-c", line], place)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ rows: \d+ completed, 0 failed", done.stderr.splitlines()[-1])


@pytest.mark.parametrize("code", PYTHON, ids=[f"block {i}" for i in range(len(PYTHON))])
def test_each_block_of_python_runs(code: str, simulator: SimulatorProcess, place: Path) -> None:
    code = code.replace("http://localhost:8000/v1", simulator.base_url).replace("port=8000", f"port={simulator.port}")
    (place / "example.py").write_text(code)
    before = simulator.stats()["answered"]
    done = run([sys.executable, "example.py"], place, API_BASE=simulator.base_url)
    assert done.returncode == 0, done.stderr
    assert simulator.stats()["answered"] > before


def test_composing_the_transform_takes_about_fifteen_lines() -> None:
    lines = [line for line in PYTHON[0].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 15


def test_every_failure_kind_is_in_the_table() -> None:
    table = README[README.index("## Failures") : README.index("## Reruns")]
    kinds = set(
        re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|")))
    )
    assert kinds == {kind.value for kind in ErrorKind}


def test_every_flag_that_is_named_exists_and_every_flag_of_ours_is_in_the_help() -> None:
    ours = {f"--{name}" for name in ChatOptions.__annotations__}
    beams = {"--runner", "--num_workers", "--help"}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w]*", README))
    assert named <= ours | beams
    options, _ = parse_flags([])
    assert ours == {f"--{name}" for name in vars(options)}


def test_the_record_shown_has_the_fields_of_a_real_one(simulator: SimulatorProcess, place: Path) -> None:
    shown = json.loads(blocks("json")[0])
    done = run(
        [sys.executable, "-m", "pipelines.run", "--input=data/a.jsonl", "--output=out", "--model=m", "--num_workers=1",
         f"--base_url={simulator.base_url}"],
        place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    real = json.loads((place / "out/completed-00000-of-00001.jsonl").read_text())
    assert list(shown) == list(real)
    assert list(shown["beam_llm"]) == list(real["beam_llm"])
    assert list(shown["response"]) == list(real["response"])
