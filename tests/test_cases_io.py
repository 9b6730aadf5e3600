"""Files through ReadRequests, ChatCompletion and WriteResults: the reported cases of reading and writing."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest

from beam_llm.config import ChatConfig
from beam_llm.io import Format, InputFormat, ReadRequests, WriteResults
from beam_llm.transforms import ChatCompletion
from tests.endpoint import ScriptedEndpoint, echo, last_text
from tests.pipelines import config, counters, local
from tests.replies import Replies, Reply

SEPARATORS = "a\u2028b\u2029c\u0085d\u000be\u000cf"
"""What Unicode, but not JSON Lines, takes for ends of lines."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """Result files, every line read strictly: UTF-8, JSON without NaN, only LF between lines."""

    completed: list[Record]
    failed: list[Record]
    counters: dict[str, int]
    data: bytes


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def records(data: bytes) -> list[Record]:
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line.decode("utf-8"), parse_constant=refuse_constant) for line in data.split(b"\n")[:-1]]


def run_file(
    settings: ChatConfig, files: Path | list[Path], output: Path, file_format: Format = Format.OPENAI_BATCH
) -> Written:
    patterns = [str(file) for file in ([files] if isinstance(files, Path) else files)]
    pipeline = beam.Pipeline(options=local())
    read = pipeline | ReadRequests(patterns, InputFormat(file_format))
    _ = (read | ChatCompletion(settings)) | WriteResults(str(output), file_format)
    result = pipeline.run()
    result.wait_until_finish()
    data = {name: b"".join(f.read_bytes() for f in output.glob(f"{name}-*")) for name in ("completed", "failed")}
    return Written(records(data["completed"]), records(data["failed"]), counters(result), b"".join(data.values()))


def line(custom_id: str, text: str) -> bytes:
    """A batch line whose text stands in it raw, where JSON allows that."""
    body = {"custom_id": custom_id, "url": "/v1/chat/completions", "body": {"messages": text}}
    return json.dumps(body, ensure_ascii=False).encode()


def answers(written: Written) -> dict[str, str]:
    return {r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in written.completed}


A, B = line("a", "A"), line("b", "B")


@pytest.mark.parametrize(
    "data",
    [
        A + b"\n\n   \n" + B + b"\n\n",
        b"\xef\xbb\xbf" + A + b"\n" + B + b"\n",
        A + b"\r\n" + B + b"\r\n",
        b"\xef\xbb\xbf\r\n" + A + b"\r\n \t\r\n" + B,
    ],
    ids=["blank lines", "byte order mark", "CRLF", "all of it, no last line end"],
)
def test_what_stands_around_rows_costs_none_and_makes_none(data: bytes, tmp_path: Path) -> None:
    """C42, C43, C46."""
    (tmp_path / "in.jsonl").write_bytes(data)
    with ScriptedEndpoint(echo) as endpoint:
        written = run_file(config(endpoint), tmp_path / "in.jsonl", tmp_path / "out")
        assert sorted(last_text(body) for body in endpoint.requests) == ["A", "B"]
    assert answers(written) == {"a": "A", "b": "B"}
    assert (written.failed, written.counters["rows"]) == ([], 2)


def test_a_crlf_file_that_is_read_in_many_ranges_gives_each_row_once_without_its_cr(tmp_path: Path) -> None:
    """C46: 1,000 rows of varying length, in the ranges that a large file gets."""
    texts = {f"r{n}": "x" * (n % 97) + str(n) for n in range(1000)}
    data = b"".join(line(name, text) + b"\r\n" for name, text in texts.items())
    (tmp_path / "in.jsonl").write_bytes(data)
    assert len(data) > 4 * (16 << 10), "one range would show nothing"
    with ScriptedEndpoint(echo) as endpoint:
        written = run_file(config(endpoint), tmp_path / "in.jsonl", tmp_path / "out")
    assert answers(written) == texts
    assert len(written.completed) == 1000
    assert b"\\r" not in written.data


@pytest.mark.parametrize("file_format", list(Format))
def test_separators_of_unicode_are_text_from_the_file_to_the_answer_and_in_a_rerun(
    file_format: Format, tmp_path: Path
) -> None:
    """C44: read, asked, answered, written, read again: the same text everywhere, and nothing is asked twice."""
    rows = {"custom_id": "a", "prompt": SEPARATORS} if file_format is Format.ROWS else None
    raw = line("a", SEPARATORS) if rows is None else json.dumps(rows, ensure_ascii=False).encode()
    (tmp_path / "in.jsonl").write_bytes(raw + b"\n")
    with ScriptedEndpoint(echo) as endpoint:
        settings = config(endpoint, response_store=f"sqlite:///{tmp_path}/answers.db")
        for output in ("first", "again"):
            written = run_file(settings, tmp_path / "in.jsonl", tmp_path / output, file_format)
            [record] = written.completed
            found = answers(written)["a"] if rows is None else record["answer"]
            assert found == SEPARATORS
            assert rows is None or record["prompt"] == SEPARATORS
        assert [last_text(body) for body in endpoint.requests] == [SEPARATORS]


def test_a_line_of_bad_bytes_is_one_failed_record_and_stops_nothing(tmp_path: Path) -> None:
    """C45: with file, offset and the raw bytes in a safe form."""
    bad = b'{"custom_id":"bad","body":{"messages":"\xe0\x41"}}'
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([A, bad, B]) + b"\n")
    with ScriptedEndpoint(echo) as endpoint:
        written = run_file(config(endpoint), tmp_path / "in.jsonl", tmp_path / "out")
    assert answers(written) == {"a": "A", "b": "B"}
    [failed] = written.failed
    place = failed["beam_llm"]
    assert (place["kind"], place["file"], place["offset"]) == ("bad_input", str(tmp_path / "in.jsonl"), len(A) + 1)
    assert "\\xe0A" in place["input"]
    assert "not UTF-8: byte 0xe0 at position" in failed["error"]["message"]


def test_rows_with_the_same_id_or_none_all_get_their_own_answer_and_can_be_told_apart(tmp_path: Path) -> None:
    """C47: four rows, four results; file and offset are the second key, with a response store too."""
    rows = [line("x", "one"), line("x", "two"), line("", "three"), b'{"body":{"messages":"four"}}']
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    offsets = [sum(len(row) + 1 for row in rows[:n]) for n in range(4)]
    expected = dict(zip(offsets, ["one", "two", "three", "four"], strict=True))
    with ScriptedEndpoint(echo) as endpoint:
        settings = config(endpoint, response_store=f"sqlite:///{tmp_path}/answers.db")
        for output in ("first", "again"):
            written = run_file(settings, tmp_path / "in.jsonl", tmp_path / output)
            found = {
                r["beam_llm"]["offset"]: r["response"]["body"]["choices"][0]["message"]["content"]
                for r in written.completed
            }
            assert found == expected
            assert len({r["id"] for r in written.completed}) == len(written.completed) == 4
        assert len(endpoint.requests) == 4
    ids = sorted(r["custom_id"] for r in written.completed)
    assert ids == sorted(["x", "x", *(f"{tmp_path / 'in.jsonl'}:{offset}" for offset in offsets[2:])])


def test_gzip_is_read_to_its_end_whatever_its_name_and_a_cut_one_fails_loudly(tmp_path: Path) -> None:
    """C48: the rows before the cut are kept, and one record says that more are missing."""
    rows = [line(f"r{n}", f"text {n} " + "x" * (n * 7919 % 301)) for n in range(300)]
    packed = gzip.compress(b"\n".join(rows) + b"\n")
    files = {"named.jsonl.gz": packed, "unnamed.jsonl": packed, "cut.jsonl.gz": packed[: len(packed) // 2]}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with ScriptedEndpoint(echo) as endpoint:
        found = {name: run_file(config(endpoint), tmp_path / name, tmp_path / f"out-{name}") for name in files}
    for name in ("named.jsonl.gz", "unnamed.jsonl"):
        assert answers(found[name]).keys() == {f"r{n}" for n in range(300)}
        assert found[name].failed == []
    cut = found["cut.jsonl.gz"]
    assert answers(cut).keys() == {f"r{n}" for n in range(len(cut.completed))}
    assert 0 < len(cut.completed) < 300
    [damaged] = cut.failed
    assert damaged["custom_id"] == f"{tmp_path / 'cut.jsonl.gz'}:damaged"
    assert "cut off or damaged" in damaged["error"]["message"]


def raw_answer(message: bytes, more: bytes = b"") -> Reply:
    """A completion whose bytes JSON parsers may not like."""
    return Reply(200, b'{"choices":[{"message":{"content":%s},"finish_reason":"stop"%s}]}' % (message, more))


@pytest.mark.parametrize("file_format", list(Format))
def test_odd_characters_and_numbers_of_an_answer_end_in_a_valid_file(file_format: Format, tmp_path: Path) -> None:
    """C57, C58: half a surrogate pair is U+FFFD, minus infinity and NaN are null; the rows are kept, all of them."""
    logprobs = b',"logprobs":{"content":[{"token":"a","logprob":-Infinity},{"token":"b","logprob":NaN}]}'
    texts = {"half": "abc\ufffddef", "odd": "ok", "plain": "plain"}
    rows = {"half": [raw_answer(b'"abc\\ud835def"')], "odd": [raw_answer(b'"ok"', logprobs)]}
    lines = [
        line(t, t) if file_format is Format.OPENAI_BATCH else json.dumps({"custom_id": t, "prompt": t}).encode()
        for t in texts
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with ScriptedEndpoint(Replies(rows)) as endpoint:
        written = run_file(config(endpoint), tmp_path / "in.jsonl", tmp_path / "out", file_format)
    assert written.failed == []
    found = {r["custom_id"]: r for r in written.completed}
    if file_format is Format.OPENAI_BATCH:
        assert answers(written) == texts
        logged = found["odd"]["response"]["body"]["choices"][0]["logprobs"]
    else:
        assert {name: r["answer"] for name, r in found.items()} == {
            "half": "abc\ufffddef",
            "odd": "ok",
            "plain": "plain",
        }
        logged = found["odd"]["logprobs"]
    assert [token["logprob"] for token in logged["content"]] == [None, None]


def test_rows_that_fail_are_in_the_files_and_in_the_counters_and_none_is_left_out(tmp_path: Path) -> None:
    """C27: 100 rows, seven of which are always answered with 500."""
    bad = [f"r{n}" for n in range(0, 100, 15)]
    (tmp_path / "in.jsonl").write_bytes(b"".join(line(f"r{n}", f"r{n}") + b"\n" for n in range(100)))
    broken = Reply(500, {"error": {"message": "broken"}})
    with ScriptedEndpoint(Replies({name: [broken] for name in bad}, always=True)) as endpoint:
        written = run_file(config(endpoint), tmp_path / "in.jsonl", tmp_path / "out")
    assert answers(written) == {f"r{n}": f"r{n}" for n in range(100) if f"r{n}" not in bad}
    assert sorted(r["custom_id"] for r in written.failed) == sorted(bad)
    assert all(r["beam_llm"]["offset"] is not None and r["error"]["message"] == "broken" for r in written.failed)
    books = {name: written.counters[name] for name in ("rows", "completed", "failed", "failed_server_error")}
    assert books == {"rows": 100, "completed": 93, "failed": 7, "failed_server_error": 7}


def test_a_good_file_beside_a_damaged_one_is_answered_whole(tmp_path: Path) -> None:
    """C45, C61: what is wrong with one file is no business of another."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(A + b"\n")[:-9])
    (tmp_path / "b.jsonl").write_bytes(B + b"\n")
    with ScriptedEndpoint(echo) as endpoint:
        files = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"]
        written = run_file(config(endpoint), files, tmp_path / "out")
    assert answers(written)["b"] == "B"
    assert [r["custom_id"] for r in written.failed] == [f"{files[0]}:damaged"]
