from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from beam_llm.errors import ConfigError
from beam_llm.result_folder import StaleResults, job_of, refuse_loss
from tests.commands import ids, request, run, write_lines


def finished(folder: Path, patterns: list[str], limit: int | None) -> None:
    """A folder as a run leaves it."""
    (folder / "summary.json").write_bytes(orjson.dumps({"rows": 1, **job_of(patterns, limit)}))


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ((["a.jsonl"], None), (["a.jsonl"], None), False),
        ((["a.jsonl"], None), (["./a.jsonl"], None), False),
        ((["a.jsonl"], 5), (["a.jsonl"], None), False),
        ((["a.jsonl"], 5), (["a.jsonl"], 9), False),
        ((["a.jsonl"], None), (["a.jsonl"], 5), True),
        ((["a.jsonl"], 9), (["a.jsonl"], 5), True),
        ((["a.jsonl"], None), (["b.jsonl"], None), True),
        ((["gs://b/*.jsonl"], None), (["gs://b/*.jsonl"], None), False),
    ],
)
def test_results_of_another_job_are_not_replaced(
    tmp_path: Path, before: tuple[list[str], int | None], now: tuple[list[str], int | None], refused: bool
) -> None:
    finished(tmp_path, *before)
    if refused:
        with pytest.raises(ConfigError, match="another job"):
            refuse_loss(str(tmp_path), [], job_of(*now))
    else:
        refuse_loss(str(tmp_path), [], job_of(*now))


@pytest.mark.parametrize("name", ["failed-00000-of-00002.jsonl", "completed-00000-of-00001.jsonl", "summary.json"])
def test_a_result_of_the_folder_is_no_input_for_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is a result file"):
        refuse_loss(f"{tmp_path}/", [f"{tmp_path}/rows.jsonl", f"{tmp_path}/{name}"], job_of(["x"], None))
    refuse_loss(str(tmp_path / "other"), [f"{tmp_path}/{name}"], job_of(["x"], None))


@pytest.mark.parametrize("text", ["", "[1]", '{"rows": 3}', "{"])
def test_a_summary_of_something_else_refuses_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    refuse_loss(str(tmp_path), [], job_of(["a"], None))  # does not raise
    assert (tmp_path / "summary.json").read_text() == text


def test_only_what_a_run_has_not_written_anew_is_stale(tmp_path: Path) -> None:
    old, other = tmp_path / "failed-00000-of-00002.jsonl", tmp_path / "notes.jsonl"
    old.write_text("{}")
    other.write_text("{}")
    stale = StaleResults(str(tmp_path))
    new = tmp_path / "completed-00000-of-00001.jsonl"
    new.write_text("{}")
    stale.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([new.name, other.name])


def test_looking_at_the_rows_leaves_the_answers_alone(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", request("a", "hello"), request("b", "you"))
    flags = (f"--input={file}", "--base_url=simulated", "--num_workers=1", "--response_store=none")
    first = run(tmp_path / "out", *flags, code=0)
    run(tmp_path / "out", *flags, "--validate_only", "--limit=1", code=0)
    assert ids(first.completed) == ["a", "b"]
    assert first.summary["completed"] == 2
    refused = run(tmp_path / "out", *flags, "--limit=1", code=2)
    assert "another job" in refused.lines[-1]
    assert ids(first.completed) == ["a", "b"]
