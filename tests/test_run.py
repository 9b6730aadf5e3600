"""The command line: what it reads, what it sends, what it writes, and what it says of a mistake in its flags."""

from __future__ import annotations

import base64
import gzip
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.commands import Finished, Record, answer_of, ids, picture_part, request, run, write_lines
from tests.endpoint import ScriptedEndpoint

JPEG_TEXT = b"this is a text file, whatever its name says\n"


@dataclass(frozen=True, slots=True)
class Bad:
    """A line that makes no request: its bytes, why, words that the reason must hold, and the id if it can be read."""

    line: bytes
    kind: str
    reason: str
    custom_id: str | None = None


@dataclass(frozen=True, slots=True)
class Mixed:
    """A file of good and bad lines in one format, and the runs over it."""

    format: str
    file: Path
    bad: dict[int, Bad]
    good: dict[int, str]
    first: Finished
    again: Finished
    checked: Finished
    endpoint: ScriptedEndpoint
    sent_by_check: int


def row(custom_id: str | None, text: Any, picture: Path | None = None, **columns: Any) -> Record:
    """A line of the `rows` format."""
    line = {} if custom_id is None else {"custom_id": custom_id}
    return {**line, "prompt": text, **({} if picture is None else {"image": str(picture)}), **columns}


def pictures(folder: Path) -> dict[str, Path]:
    buffer = io.BytesIO()
    Image.effect_noise((64, 48), 50).convert("RGB").save(buffer, "JPEG")
    jpeg = buffer.getvalue()
    files = {"sound.jpg": jpeg, "text.jpg": JPEG_TEXT, "cut.jpg": jpeg[: len(jpeg) // 2], "empty.png": b""}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {name: folder / name for name in (*files, "missing.jpg")}


def as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def bad_lines(kind: str, picture: dict[str, Path]) -> list[Bad]:
    """Every plain way in which a line of a format can be bad."""
    batch = kind == "openai_batch"

    def with_picture(name: str) -> bytes:
        part = [{"type": "text", "text": "what is it"}, picture_part(picture[name])]
        return as_json(request(None, part) if batch else row(None, "what is it", picture[name]))

    lines = [
        Bad(b'{"custom_id": "cut", "body": {', "bad_input", "not JSON"),
        Bad(b"plain text", "bad_input", "not JSON"),
        Bad(b"[1, 2]", "bad_input", "not a JSON object"),
        Bad(b'"hello"', "bad_input", "not a JSON object"),
        Bad(b'{"custom_id": "utf", "prompt": "caf\xe9"}', "bad_input", "not UTF-8: byte 0xe9"),
        Bad(with_picture("missing.jpg"), "bad_image", "does not exist"),
        Bad(with_picture("text.jpg"), "bad_image", "text.jpg"),
        Bad(with_picture("cut.jpg"), "bad_image", "cut.jpg"),
        Bad(with_picture("empty.png"), "bad_image", "is empty"),
    ]
    if batch:
        return [
            *lines,
            Bad(as_json({"url": "/v1/chat/completions"}), "bad_input", "body: expected an object, got None"),
            Bad(
                as_json({"custom_id": "own", "body": "text"}),
                "bad_input",
                "body: expected an object, got 'text'",
                "own",
            ),
            Bad(as_json({"body": {"model": "m"}}), "bad_input", "body.messages: missing"),
            Bad(as_json({"body": {"model": "m", "messages": []}}), "bad_input", "the list is empty"),
            Bad(as_json({"body": {"model": "m", "messages": 7}}), "bad_input", "messages: expected"),
            Bad(as_json({**request(None, "x"), "url": "/v1/embeddings"}), "bad_input", "'/v1/embeddings'"),
            Bad(as_json({**request(None, "x"), "method": "GET"}), "bad_input", "'GET'"),
        ]
    return [
        *lines,
        Bad(as_json({"question": "no prompt"}), "bad_input", "column 'prompt' is missing; the row has 'question'"),
        Bad(as_json({"prompt": None}), "bad_input", "column 'prompt' is null"),
        Bad(as_json({"custom_id": 7, "prompt": 7}), "bad_input", "prompt: expected a string, got 7", "7"),
        Bad(as_json({"prompt": "x", "body": "text"}), "bad_input", "body: expected an object"),
        Bad(as_json({"messages": []}), "bad_input", "the list is empty"),
    ]


@pytest.fixture(scope="module", params=["openai_batch", "rows"])
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    """Good lines between bad ones, with a byte order mark, CRLF ends and blank lines; read three times."""
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind)
    picture = pictures(folder)
    data, good, bad = b"\xef\xbb\xbf", {}, {}
    for number, each in enumerate([None, *bad_lines(kind, picture), None]):
        # The text of a good line is its own offset, so that an answer shows whose it is.
        offset = len(data) if number else 0
        data += good_line(kind, offset, picture["sound.jpg"]) + (b"\r\n" if number % 2 else b"\n")
        good[offset] = f"line at {offset}"
        if each is not None:
            data += [b"", b"\n", b"  \t \r\n"][number % 3]
            bad[len(data)] = each
            data += each.line + (b"\n" if number % 2 else b"\r\n")
    file = folder / "mixed.jsonl"
    file.write_bytes(data.removesuffix(b"\n").removesuffix(b"\r"))
    with ScriptedEndpoint() as endpoint:
        flags = (f"--input={file}", f"--base_url={endpoint.base_url}", "--model=m")
        checked = run(folder / "checked", *flags, "--num_workers=1", "--validate_only")
        sent_by_check = len(endpoint.requests)
        first = run(folder / "first", *flags, "--num_workers=1")
        again = run(folder / "again", *flags, "--num_workers=2", "--max_failed_ratio=0.5")
    return Mixed(kind, file, bad, good, first, again, checked, endpoint, sent_by_check)


def good_line(kind: str, offset: int, picture: Path) -> bytes:
    text = f"line at {offset}"
    if kind == "openai_batch":
        return as_json(request(None, [picture_part(picture), {"type": "text", "text": text}]))
    return as_json(row(None, text, picture, name="é"))


def test_every_bad_line_gives_one_failed_record_with_kind_reason_file_and_offset(mixed: Mixed) -> None:
    found = {}
    for record in mixed.first.failed:
        error = record["error"]
        where = record["beam_llm"] if mixed.format == "openai_batch" else error
        kind = error["code"] if mixed.format == "openai_batch" else error["kind"]
        assert where["file"] == str(mixed.file)
        found[where["offset"]] = (kind, error["message"], where["attempts"], where["source"])
    assert len(mixed.first.failed) == len(mixed.bad)
    assert found.keys() == mixed.bad.keys()
    for offset, bad in mixed.bad.items():
        kind, message, attempts, source = found[offset]
        assert (kind, attempts, source) == (bad.kind, 0, "client"), bad
        assert bad.reason in message


def test_everything_else_is_delivered_and_each_answer_is_its_own_lines(mixed: Mixed) -> None:
    if mixed.format == "openai_batch":
        answers = {record["custom_id"]: answer_of(record) for record in mixed.first.completed}
    else:
        answers = {record["custom_id"]: record["answer"] for record in mixed.first.completed}
        assert {record["name"] for record in mixed.first.completed} == {"é"}
    assert answers == {f"{mixed.file}:{offset}": text for offset, text in mixed.good.items()}
    assert len(mixed.first.completed) == len(mixed.good)


def test_bad_lines_mean_exit_code_3_unless_that_share_is_allowed(mixed: Mixed) -> None:
    assert (mixed.first.code, mixed.again.code) == (3, 0)
    for done in (mixed.first, mixed.again):
        assert done.summary["exit_code"] == done.code
        assert done.summary["rows"] == len(mixed.good) + len(mixed.bad)
        assert done.summary["completed"] == len(mixed.good)
        assert done.summary["failed"] == sum(done.summary["failed_by_kind"].values()) == len(mixed.bad)


def test_an_id_is_the_lines_own_or_its_file_and_offset_in_every_run(mixed: Mixed) -> None:
    expected = sorted(bad.custom_id or f"{mixed.file}:{offset}" for offset, bad in mixed.bad.items())
    assert ids(mixed.first.failed) == ids(mixed.again.failed) == ids(mixed.checked.invalid) == expected
    assert ids(mixed.first.completed) == ids(mixed.again.completed) == sorted(f"{mixed.file}:{o}" for o in mixed.good)


def test_validate_only_reports_bad_lines_and_sends_nothing(mixed: Mixed) -> None:
    assert mixed.sent_by_check == 0
    assert mixed.checked.code == 3
    assert mixed.checked.completed == []
    assert mixed.checked.validation["requests_sent"] == 0
    good, bad = len(mixed.good), len(mixed.bad)
    assert mixed.checked.lines[-1].startswith(f"{good + bad} rows: {good} can be sent, {bad} failed (bad_input ")
    assert sorted(r["error"]["message"] for r in mixed.checked.invalid) == sorted(
        r["error"]["message"] for r in mixed.first.failed
    )


def test_a_sound_jpeg_is_sent_as_it_is(mixed: Mixed) -> None:
    picture = base64.b64encode((mixed.file.parent / "sound.jpg").read_bytes()).decode()
    sent = {
        part["image_url"]["url"]
        for body in mixed.endpoint.requests
        for part in body["messages"][0]["content"]
        if part["type"] == "image_url"
    }
    assert sent == {f"data:image/jpeg;base64,{picture}"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four input files; `<file>-<line>` is each line's id and its text."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "more").mkdir()
    for name, count in (("part-1.jsonl", 3), ("part-2.jsonl.gz", 4), ("part-3.jsonl", 0), ("more/last.jsonl", 5)):
        lines = [request(f"{name}-{i}", f"{name}-{i}", max_tokens=9) for i in range(count)]
        path = write_lines(folder / name, *lines)
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
    return folder


def ids_of(name: str, count: int) -> list[str]:
    return [f"{name}-{i}" for i in range(count)]


def test_globs_and_several_files_gzip_among_them_are_read_once_each(files: Path, tmp_path: Path) -> None:
    pattern = f"--input={files}/part-*,{files}/more/last.jsonl,{files}/part-1.jsonl"
    with ScriptedEndpoint() as endpoint:
        flags = (f"--base_url={endpoint.base_url}", "--num_workers=1", "--output_format=rows")
        done = run(tmp_path / "out", pattern, *flags, code=0)
    answers = {record["custom_id"]: record["answer"] for record in done.completed}
    expected = [*ids_of("part-1.jsonl", 3), *ids_of("part-2.jsonl.gz", 4), *ids_of("more/last.jsonl", 5)]
    assert answers == {custom_id: custom_id for custom_id in expected}
    assert len(done.completed) == len(expected)
    assert done.failed == []
    # The columns of `rows`, although the input is `openai_batch`.
    assert {"custom_id", "answer", "reasoning", "finish_reason", "usage"} <= done.completed[0].keys()
    assert "response" not in done.completed[0]


def test_limit_takes_the_first_rows_across_files(files: Path, tmp_path: Path) -> None:
    flags = (f"--input={files}/more/last.jsonl,{files}/part-*", "--num_workers=1", "--limit=10")
    done = run(tmp_path / "out", *flags, "--base_url=simulated", code=0)
    expected = [*ids_of("more/last.jsonl", 5), *ids_of("part-1.jsonl", 3), *ids_of("part-2.jsonl.gz", 2)]
    assert ids(done.completed) == sorted(expected)


def test_limit_takes_the_first_rows_of_a_file_that_two_workers_share(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", *(request(f"r{i}", f"row {i} {'x' * 400}") for i in range(400)))
    flags = (f"--input={file}", "--base_url=simulated", "--num_workers=2", "--limit=250")
    done = run(tmp_path / "out", *flags, code=0)
    assert ids(done.completed) == sorted(f"r{i}" for i in range(250))
    assert done.summary["rows"] == 250
    assert len(done.shards("completed")) == 2


SAMPLING: dict[str, Record] = {
    "--temperature=0": {"temperature": 0.0},
    "--top_p=0.5": {"top_p": 0.5},
    "--top_k=40": {"top_k": 40},
    "--min_p=0.05": {"min_p": 0.05},
    "--presence_penalty=-1.5": {"presence_penalty": -1.5},
    "--repetition_penalty=1.1": {"repetition_penalty": 1.1},
    "--max_tokens=77": {"max_tokens": 77},
    "--enable_thinking=false": {"chat_template_kwargs": {"enable_thinking": False}},
    '--extra_body={"seed": 3, "stop": ["a", "b"]}': {"seed": 3, "stop": ["a", "b"]},
}


def test_rows_become_exactly_the_bodies_that_columns_and_flags_name(tmp_path: Path) -> None:
    picture = pictures(tmp_path)["sound.jpg"]
    url = "data:image/jpeg;base64," + base64.b64encode(picture.read_bytes()).decode()
    rows = [
        {"title": "A {dish}", "n": 1, "left": str(picture), "right": [str(picture), str(picture)]},
        {"title": "Ü", "n": 2, "left": str(picture), "right": [], "body": {"temperature": 1.5, "max_tokens": 5}},
    ]
    with ScriptedEndpoint() as endpoint:
        done = run(
            tmp_path / "out",
            f"--input={write_lines(tmp_path / 'in.jsonl', *rows)}",
            f"--base_url={endpoint.base_url}",
            "--model=m",
            "--dialect=vllm",
            "--prompt=Describe {title}, {n} of {{2}}",
            "--system_prompt=Be brief.",
            "--image_column=left",
            "--image_column=right",
            *SAMPLING,
            "--api_key_env=OTHER_KEY",
            "--num_workers=1",
            "--job_name=an-option-of-beam",
            env={"OTHER_KEY": "  key-of-that-variable\n", "OPENAI_API_KEY": "not-this-one"},
            code=0,
        )
    fields = {"model": "m", **{name: value for said in SAMPLING.values() for name, value in said.items()}}
    image = {"type": "image_url", "image_url": {"url": url}}
    expected = [
        {**fields, "messages": messages("Describe A {dish}, 1 of {2}", image, image, image)},
        {**fields, "temperature": 1.5, "max_tokens": 5, "messages": messages("Describe Ü, 2 of {2}", image)},
    ]
    assert sorted(endpoint.requests, key=json.dumps) == sorted(expected, key=json.dumps)
    assert {headers["Authorization"] for headers in endpoint.headers} == {"Bearer key-of-that-variable"}
    assert [{name: record[name] for name in rows[0]} for record in sorted(done.completed, key=lambda r: r["n"])] == [
        {name: each[name] for name in rows[0]} for each in rows
    ]


def messages(text: str, *images: Record) -> list[Record]:
    """The messages of that prompt."""
    content = [*images, {"type": "text", "text": text}]
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]


def test_nothing_that_was_not_set_is_sent(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    rows = [{"turns": asked, "note": "n", "id": 3}, {"turns": "Hello", "custom_id": "c"}]
    with ScriptedEndpoint() as endpoint:
        flags = (f"--base_url={endpoint.base_url}", "--model=m", "--messages_column=turns", "--num_workers=1")
        run(tmp_path / "out", f"--input={write_lines(tmp_path / 'in.jsonl', *rows)}", *flags, code=0)
    expected = [{"model": "m", "messages": asked}, {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}]
    assert sorted(endpoint.requests, key=json.dumps) == sorted(expected, key=json.dumps)
    assert [headers.get("Authorization") for headers in endpoint.headers] == [None, None]
    assert set(endpoint.paths) == {"/v1/chat/completions"}


@pytest.mark.parametrize(
    ("swap", "says"),
    [("input", "cannot be read: Is a directory"), ("output", "name a folder that can be written to")],
)
def test_a_folder_for_a_file_and_a_file_for_a_folder_are_usage_errors(swap: str, says: str, tmp_path: Path) -> None:
    file, folder = write_lines(tmp_path / "in.jsonl", request("a", "b")), tmp_path / "folder"
    folder.mkdir()
    given, output = (folder, tmp_path / "out") if swap == "input" else (file, file)
    done = run(output, f"--input={given}", "--base_url=simulated", "--num_workers=1")
    assert done.code == 2
    [line] = done.lines
    assert says in line


def test_a_field_that_the_dialect_refuses_fails_its_row_only(tmp_path: Path) -> None:
    rows = [request("plain", "hello"), request("refused", "hello", top_k=5)]
    flags = ("--base_url=simulated?strict_fields=true", "--dialect=openai", "--num_workers=1")
    done = run(tmp_path / "out", f"--input={write_lines(tmp_path / 'in.jsonl', *rows)}", *flags, code=3)
    assert ids(done.completed) == ["plain"]
    [failed] = done.failed
    assert failed["custom_id"] == "refused"
    assert failed["error"]["code"] == "bad_input"
    assert "top_k=5 does not go with dialect openai" in failed["error"]["message"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--input=nothing-*.jsonl"], "no file matches 'nothing-*.jsonl'"),
        (["--max-concurency", "500"], "unknown flag --max-concurency: it is --max_in_flight here"),
        (["--modle=m"], "unknown flag --modle: did you mean --model?"),
        (["--num_workers=two"], "--num_workers: invalid int value: 'two'"),
        (["--runner=Nope"], "runner=Nope"),
        (["--base_url="], "no endpoint: give --base_url="),
        (["--base_url=simulated?latency=3"], "did you mean 'latency_ms'?"),
        (["--dialect=openai", "--top_k=5"], "top_k=5 does not go with dialect openai"),
        (["--max_in_flight=100000000"], "max_in_flight=100000000 needs 100000"),
        (["--api_key=sk-canary-123"], "a key is never a flag"),
    ],
    ids=lambda value: value[0].split("=")[0].lstrip("-") if isinstance(value, list) else "",
)
def test_a_mistake_in_the_flags_is_one_clear_line_and_exit_code_2(flags: list[str], says: str, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", request("a", "b"))
    done = run(tmp_path / "out", f"--input={file}", "--base_url=simulated", *flags)
    assert done.code == 2
    [line] = done.lines
    assert line.startswith("error: ")
    assert says in line
    assert "canary" not in line
    assert not done.output.exists()


def test_a_key_that_no_header_can_carry_is_a_usage_error(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", request("a", "b"))
    flags = (f"--input={file}", "--base_url=http://127.0.0.1:9/v1")
    done = run(tmp_path / "out", *flags, env={"OPENAI_API_KEY": "sk-canary\n-123"}, code=2)
    [line] = done.lines
    assert "the key in $OPENAI_API_KEY has a line end" in line
    assert "canary" not in line
