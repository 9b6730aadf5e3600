"""The promise at scale, through the command line: 20,000 rows with pictures, and 8,192 requests open at once.

Every row gives exactly one record, and each answer is its own row's: the simulator answers with the text that it was
asked and the format and size of the picture that came with it.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from PIL import Image

from beam_llm.simulator import Script, SimulatorProcess, is_doomed
from tests.commands import Finished, Record, answer_of, ids, picture_part, request, run, write_lines

ROWS = 20_000
OPEN_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Job:
    """An input file, and what the simulator must answer to each of its rows."""

    file: Path
    answers: dict[str, str]


def make_pictures(folder: Path) -> list[tuple[Path, str]]:
    """24 pictures of different sizes, JPEG and PNG by turns, each with the words that the simulator has for it."""
    made = []
    for number in range(24):
        image_format = ("JPEG", "PNG")[number % 2]
        buffer = io.BytesIO()
        Image.effect_noise((40 + number, 64), 30).convert("RGB").save(buffer, image_format)
        path = folder / f"{number}.{image_format.lower()}"
        path.write_bytes(buffer.getvalue())
        made.append((path, f"[image {image_format} {40 + number}x64]"))
    return made


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    pictures = make_pictures(folder)
    rows, answers = [], {}
    for number in range(ROWS):
        path, words = pictures[number % len(pictures)]
        text = f"row {number}"
        rows.append(request(f"r{number}", [picture_part(path), {"type": "text", "text": text}]))
        answers[f"r{number}"] = f"{text} {words}"
    return Job(write_lines(folder / "in.jsonl", *rows), answers)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run and what the simulator counted."""

    done: Finished
    stats: Record


def run_against(script: Script, file: Path, output: Path, *flags: str) -> Outcome:
    with SimulatorProcess(script) as simulator:
        flags = (f"--input={file}", f"--base_url={simulator.base_url}", "--num_workers=2", *flags)
        return Outcome(run(output, *flags, timeout_s=120), simulator.stats())


@pytest.fixture(scope="module")
def clean(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_against(Script(), job.file, tmp_path_factory.mktemp("clean") / "out")


PATIENCE = ("--max_backoff_s=0.1", "--max_retries=8")
ERRORS = Script(error_rate=0.05, error_statuses=(500, 429))


@pytest.fixture(scope="module")
def faulty(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """5 % of the requests are answered with 500 or 429."""
    return run_against(ERRORS, job.file, tmp_path_factory.mktemp("faulty") / "out", *PATIENCE)


@pytest.fixture(scope="module")
def failing(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same, and 1 % of the rows fail however often they are sent."""
    script = replace(ERRORS, fail_rate=0.01, fail_status=500)
    return run_against(script, job.file, tmp_path_factory.mktemp("failing") / "out", *PATIENCE)


def assert_own_answers(records: list[Record], expected: dict[str, str]) -> None:
    """Each id exactly once, with the answer to its own row."""
    assert len(records) == len(expected)
    assert {record["custom_id"]: answer_of(record) for record in records} == expected


def test_20_000_rows_with_pictures_give_every_id_once(job: Job, clean: Outcome) -> None:
    assert clean.done.code == 0, clean.done.stderr
    assert_own_answers(clean.done.completed, job.answers)
    assert clean.done.shards("failed") == []
    assert clean.stats["requests"] == clean.stats["distinct_answered"] == ROWS
    assert clean.stats["by_status"] == {"200": ROWS}


def test_one_big_file_keeps_both_workers_busy(clean: Outcome) -> None:
    shares = [len(shard.read_bytes().splitlines()) / ROWS for shard in clean.done.shards("completed")]
    assert len(shares) == 2
    assert min(shares) > 0.4


def test_answers_of_500_and_429_are_asked_again_until_every_row_has_its_own(job: Job, faulty: Outcome) -> None:
    assert faulty.done.code == 0, faulty.done.stderr
    assert faulty.stats["by_status"]["429"] > 0.02 * ROWS
    assert faulty.stats["by_status"]["500"] > 0.02 * ROWS
    assert_own_answers(faulty.done.completed, job.answers)
    assert faulty.done.shards("failed") == []
    assert faulty.stats["answered"] == ROWS, "an answer was bought twice"


def doomed(custom_id: str) -> bool:
    return is_doomed(f"row {custom_id[1:]}", 0.01)


def test_rows_that_always_fail_are_the_failed_ones_and_no_other(job: Job, failing: Outcome) -> None:
    assert failing.done.code == 3
    expected = sorted(name for name in job.answers if doomed(name))
    assert len(expected) > 0.005 * ROWS
    assert ids(failing.done.failed) == expected
    for record in failing.done.failed:
        assert record["error"]["code"] == "server_error"
        assert "simulated permanent error 500" in record["error"]["message"]
        assert record["beam_llm"]["attempts"] == 9
    answered = {name: answer for name, answer in job.answers.items() if not doomed(name)}
    assert_own_answers(failing.done.completed, answered)


def test_the_summary_says_what_the_endpoint_counted(clean: Outcome, faulty: Outcome, failing: Outcome) -> None:
    for outcome in (clean, faulty, failing):
        done, stats, summary = outcome.done, outcome.stats, outcome.done.summary
        assert summary["rows"] == ROWS
        assert summary["completed"] == len(done.completed) == stats["answered"]
        assert summary["failed"] == len(done.failed)
        assert summary["requests_sent"] == stats["requests"]
        assert summary["retries"] == stats["requests"] - ROWS
        # Progress every 15 s, and reasons.
        shown = done.stderr.count("rows/s, ") + done.stderr.count(", for example ")
        assert len(done.lines) == 2 + shown


def test_all_requests_are_open_at_once_and_descriptors_suffice(tmp_path: Path) -> None:
    """The endpoint answers nothing before 8,192 requests are open: 4,096 in each of two processes."""
    skip_without_descriptors(OPEN_AT_ONCE + 500)
    texts = {f"r{number}": f"row {number}" for number in range(OPEN_AT_ONCE + 808)}
    file = write_lines(tmp_path / "in.jsonl", *(request(name, text) for name, text in texts.items()))
    script = Script(hold_until=OPEN_AT_ONCE)
    held = run_against(script, file, tmp_path / "out", f"--max_in_flight={OPEN_AT_ONCE // 2}")
    assert held.done.code == 0, held.done.stderr
    assert held.stats["peak_open"] == OPEN_AT_ONCE
    assert held.stats["requests"] == len(texts)
    assert held.done.summary["retries"] == 0
    assert_own_answers(held.done.completed, texts)
    assert len(held.done.lines) == 2


def skip_without_descriptors(count: int) -> None:
    """Skips where a process, the simulator here, may not have so many files open."""
    resource = pytest.importorskip("resource")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"the simulator needs {count} open files; the hard limit of this machine is {hard}")
