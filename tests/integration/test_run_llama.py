"""The command line against a real server: llama.cpp's, with text, pictures and answers bound to a JSON schema."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.commands import Finished, Record, answer_of, picture_part, request, run, write_lines
from tests.integration.llama_server import MODEL, LlamaServer

ROWS = 500
MAX_TOKENS = 6

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "sharp": {"type": "boolean"}},
    "required": ["colour", "sharp"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Run:
    """The run and its rows, by id."""

    done: Finished
    rows: dict[str, Record]


def has_schema(row: Record) -> bool:
    return "response_format" in row["body"]


def pictures_in(row: Record) -> int:
    content = row["body"]["messages"][0]["content"]
    return sum(part["type"] == "image_url" for part in content) if isinstance(content, list) else 0


def make_row(number: int, pictures: list[Path]) -> Record:
    """A question without pictures, with one or with two; every third must be answered in JSON."""
    text = f"Question {number}: is it red?"
    shown = [picture_part(pictures[(number + i) % len(pictures)]) for i in range(number % 4 if number % 4 < 3 else 0)]
    content: Any = [*shown, {"type": "text", "text": text}] if shown else text
    fields: Record = {"max_tokens": MAX_TOKENS, "seed": number}
    if number % 3 == 0:
        json_schema = {"name": "colour", "strict": True, "schema": SCHEMA}
        fields |= {"max_tokens": 256, "response_format": {"type": "json_schema", "json_schema": json_schema}}
    return request(f"r{number}", content, **{**fields, "model": MODEL})


@pytest.fixture(scope="module")
def whole(llama_server: LlamaServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("llama")
    pictures = []
    for number, name in enumerate(("red.jpg", "green.png", "blue.jpg", "grey.png")):
        pictures.append(folder / name)
        Image.new("RGB", (64 + number, 48), name.partition(".")[0]).save(pictures[-1])
    rows = [make_row(number, pictures) for number in range(ROWS)]
    flags = (f"--base_url={llama_server.base_url}", "--num_workers=2", "--max_in_flight=64")
    done = run(folder / "out", f"--input={write_lines(folder / 'in.jsonl', *rows)}", *flags, timeout_s=120)
    return Run(done, {row["custom_id"]: row for row in rows})


def test_a_real_server_answers_every_row_once(whole: Run) -> None:
    assert whole.done.code == 0, whole.done.stderr
    assert sorted(record["custom_id"] for record in whole.done.completed) == sorted(whole.rows)
    assert whole.done.failed == []
    for record in whole.done.completed:
        assert record["response"]["status_code"] == 200
        assert record["response"]["body"]["model"] == MODEL
        assert isinstance(answer_of(record), str)
        assert record["response"]["body"]["choices"][0]["finish_reason"] in ("stop", "length")


def test_answers_that_must_be_json_are_valid_by_their_schema(whole: Run) -> None:
    asked = [record for record in whole.done.completed if has_schema(whole.rows[record["custom_id"]])]
    assert len(asked) == (ROWS + 2) // 3
    for record in asked:
        answer = json.loads(answer_of(record))
        assert answer.keys() == {"colour", "sharp"}
        assert answer["colour"] in ("red", "green")
        assert isinstance(answer["sharp"], bool)


def test_pictures_of_both_formats_reach_the_model(whole: Run) -> None:
    """A picture is 16 tokens and its two marks to this model; the text of all questions is of about one length."""
    tokens: dict[int, list[int]] = {}
    for record in whole.done.completed:
        usage = record["response"]["body"]["usage"]
        tokens.setdefault(pictures_in(whole.rows[record["custom_id"]]), []).append(usage["prompt_tokens"])
    assert tokens.keys() == {0, 1, 2}
    assert min(tokens[1]) >= max(tokens[0]) + 10
    assert min(tokens[2]) >= max(tokens[1]) + 10


def test_the_limit_of_tokens_is_kept_and_counted(whole: Run) -> None:
    used = [
        record["response"]["body"]["usage"]["completion_tokens"]
        for record in whole.done.completed
        if not has_schema(whole.rows[record["custom_id"]])
    ]
    assert max(used) <= MAX_TOKENS
    total = sum(record["response"]["body"]["usage"]["completion_tokens"] for record in whole.done.completed)
    assert whole.done.summary["completion_tokens"] == total
