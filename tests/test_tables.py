"""Tables through the command line: Parquet and CSV in, Parquet out, pictures in cells and beside the file."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipelines.run import main
from tests.commands import Command, Finished, run, write_lines
from tests.endpoint import ScriptedEndpoint
from tests.test_parquet_rows import ODD

PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
METADATA = {b"huggingface": json.dumps({"info": {"features": {"image": {"_type": "Image"}}}}).encode()}


def png(shade: int, size: int = 8) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), (shade, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def shade_of(url: str) -> int:
    """Which picture was sent."""
    data = base64.b64decode(url.partition("base64,")[2])
    return int(Image.open(io.BytesIO(data)).getpixel((0, 0))[0])  # type: ignore[index]


def sent(endpoint: ScriptedEndpoint) -> dict[str, list[int]]:
    """The pictures that were sent, by the text beside them."""
    found = {}
    for body in endpoint.requests:
        content = body["messages"][-1]["content"]
        parts: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        found[text] = [shade_of(part["image_url"]["url"]) for part in parts if part["type"] == "image_url"]
    return found


def table(done: Finished, name: str = "completed") -> pa.Table:
    return pq.read_table(sorted(done.output.glob(f"{name}-*.parquet")))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of Hugging Face's kind, in three row groups: 120 pictures, some captions missing."""
    path = tmp_path_factory.mktemp("photos") / "photos.parquet"
    columns = {
        "id": pa.array(range(120), pa.int16()),
        "image": pa.array([{"bytes": png(n), "path": f"{n}.png"} for n in range(120)], PICTURE),
        "more": pa.array([[png(n + 100), png(n + 101)] for n in range(120)], pa.list_(pa.binary())),
        "caption": [None if n % 40 == 7 else f"caption {n}" for n in range(120)],
        "answer": ["what people said"] * 120,
        **{name: pa.chunked_array(ODD[name].chunks * 120, ODD[name].type) for name in ODD.column_names},
    }
    pq.write_table(pa.table(columns).replace_schema_metadata(METADATA), path, row_group_size=50)
    return path


@pytest.mark.parametrize("ordered", [False, True])
def test_parquet_comes_back_with_every_column_and_type(photos: Path, tmp_path: Path, ordered: bool) -> None:
    with ScriptedEndpoint() as endpoint:
        done = run(
            tmp_path / "out",
            f"--input={photos}",
            f"--base_url={endpoint.base_url}",
            "--model=m",
            "--num_workers=2",
            "--prompt={id}: {caption}",
            "--system_prompt=Be brief.",
            "--image_column=more",
            "--image_column=image",
            "--output_file_type=parquet",
            *(["--ordered"] if ordered else []),
            code=3,
        )
    assert sent(endpoint) == {f"{n}: caption {n}": [n + 100, n + 101, n] for n in range(120) if n % 40 != 7}
    assert {body["messages"][0]["content"] for body in endpoint.requests} == {"Be brief."}
    given = pq.read_table(photos)
    completed, failed = table(done), table(done, "failed")
    assert sorted(completed["id"].to_pylist() + failed["id"].to_pylist()) == list(range(120))
    assert sorted(failed["id"].to_pylist()) == [7, 47, 87]
    assert failed.schema == completed.schema
    assert {error["message"].partition(";")[0] for error in failed["error"].to_pylist()} == {"column 'caption' is null"}
    for found in (completed, failed):
        rows = given.take(pa.array(found["id"].to_pylist()))
        for field in given.schema:
            name = "input_answer" if field.name == "answer" else field.name
            assert found.schema.field(name).type == field.type
            assert found[name].combine_chunks().equals(rows[field.name].combine_chunks()), name
        assert found.schema.metadata[b"huggingface"] == METADATA[b"huggingface"]
    assert completed["answer"].to_pylist() == [f"{n}: caption {n}" for n in completed["id"].to_pylist()]
    assert completed["usage"][0].as_py().keys() == {"prompt_tokens", "completion_tokens", "total_tokens", "details"}
    assert completed["custom_id"].to_pylist() == [f"{photos}:{n}" for n in completed["id"].to_pylist()]
    if ordered:
        assert completed["id"].to_pylist() == sorted(completed["id"].to_pylist())


def test_parquet_comes_out_as_json_rows_without_its_pictures(photos: Path, tmp_path: Path) -> None:
    flags = [f"--input={photos}", "--base_url=simulated", "--prompt={id}", "--image_column=image", "--limit=60"]
    done = run(tmp_path / "out", *flags, "--num_workers=2", code=0)
    assert sorted(row["id"] for row in done.completed) == list(range(60))
    row = min(done.completed, key=lambda row: row["id"])
    assert row["image"] == {"bytes": f"… ({len(png(0))} bytes)", "path": "0.png"}
    assert (row["price"], row["label"], row["day"], row["ns"]) == (
        "1.25",
        "cat",
        "2026-12-01",
        "2023-11-14 22:13:20.123456789",
    )
    assert (row["input_answer"], row["answer"]) == ("what people said", "0 [image PNG 8x8]")


def test_a_look_before_sending_leaves_the_results_of_an_earlier_run(photos: Path, tmp_path: Path) -> None:
    flags = [f"--input={photos}", "--base_url=simulated", "--prompt={caption}", "--output_file_type=parquet"]
    before = run(tmp_path / "out", *flags, "--num_workers=1", code=3)
    files = {path: path.read_bytes() for path in before.output.glob("[cf]*.parquet")}
    assert len(files) == 2
    after = run(tmp_path / "out", *flags, "--num_workers=1", "--validate_only", code=3)
    assert {path: path.read_bytes() for path in after.output.glob("[cf]*.parquet")} == files
    assert table(after, "invalid")["id"].to_pylist() == [7, 47, 87]


def test_csv_rows_find_the_pictures_that_lie_beside_the_file(tmp_path: Path) -> None:
    """As in a folder of pictures with its metadata.csv; a part of them is packed."""
    for folder in ("a", "b"):
        (tmp_path / folder / "img").mkdir(parents=True)
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(["file_name", "title"])
        for n in range(20):
            shade = n + (100 if folder == "b" else 0)
            (tmp_path / folder / "img" / f"{n}.png").write_bytes(png(shade))
            writer.writerow([f"img/{n}.png", f'a "title",\nin {folder}, {n}'])
        writer.writerow(["img/gone.png", "gone"])
        writer.writerow(["img/0.png", ""])
        writer.writerow(["img/0.png", "one", "cell too many"])
        data = text.getvalue().encode()
        name = "metadata.csv" if folder == "a" else "metadata.csv.gz"
        (tmp_path / folder / name).write_bytes(gzip.compress(data) if folder == "b" else data)
    with ScriptedEndpoint() as endpoint:
        done = run(
            tmp_path / "out",
            f"--input={tmp_path}/*/metadata.csv*",
            f"--base_url={endpoint.base_url}",
            "--model=m",
            "--num_workers=1",
            "--prompt=Describe {title}",
            "--image_column=file_name",
            code=3,
        )
    assert sent(endpoint) == {
        f'Describe a "title",\nin {folder}, {n}': [n + first]
        for folder, first in (("a", 0), ("b", 100))
        for n in range(20)
    }
    reasons = sorted(row["error"]["message"].partition(";")[0] for row in done.failed)
    for reason, expected in zip(
        reasons,
        [
            *["column 'title' is null"] * 2,
            *["image img/gone.png does not exist, looked for "] * 2,
            *["the row has 3 cells, the header 2 columns"] * 2,
        ],
        strict=True,
    ):
        assert reason.startswith(expected)
    assert done.completed[0].keys() >= {"file_name", "title", "answer", "custom_id"}


def test_json_rows_with_pictures_in_them_go_to_parquet_and_nothing_is_lost(tmp_path: Path) -> None:
    big = "data:image/png;base64," + base64.b64encode(png(9, 400) + bytes(8000)).decode()
    rows: list[dict[str, Any]] = [
        {"custom_id": "a", "prompt": "first", "image": big, "n": 1, "score": 1, "tags": ["x"]},
        {"custom_id": "b", "prompt": "second", "n": None, "score": 2.5, "late": None},
        *({"custom_id": f"c{i}", "prompt": "third", "n": 2} for i in range(150)),
        {"custom_id": "z", "prompt": "fourth", "n": "two", "late": {"column": 1}},
    ]
    with ScriptedEndpoint() as endpoint:
        flags = [f"--base_url={endpoint.base_url}", "--model=m", "--num_workers=1", "--output_file_type=parquet"]
        done = run(tmp_path / "out", f"--input={write_lines(tmp_path / 'rows.jsonl', *rows)}", *flags, code=0)
    assert sent(endpoint)["first"] == [9]
    found = {row["custom_id"]: row for row in table(done).to_pylist()}
    assert found.keys() == {row["custom_id"] for row in rows}
    assert {name: found["a"][name] for name in ("prompt", "n", "score")} == {"prompt": "first", "n": 1, "score": 1.0}
    assert found["a"]["image"] == f"data:image/png;base64,… ({len(big)} characters)"
    assert json.loads(found["a"]["input_rest"]) == {"tags": ["x"]}
    assert (found["b"]["n"], found["b"]["score"], found["b"]["input_rest"]) == (None, 2.5, None)
    assert found["z"]["n"] is None
    assert json.loads(found["z"]["input_rest"]) == {"n": "two", "late": {"column": 1}}


def test_messages_of_a_table_get_their_pictures_from_their_column(tmp_path: Path) -> None:
    """As vision data sets have them: structs with a field for every kind of part, pictures in a column of their own."""
    part = pa.struct([("type", pa.string()), ("text", pa.string())])
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    content = [{"type": "image", "text": None}, {"type": "text", "text": "both of"}, {"type": "image", "text": None}]
    path = tmp_path / "chat.parquet"
    columns = {
        "images": pa.array([[{"bytes": png(1), "path": None}, {"bytes": png(2), "path": None}]] * 2, pa.list_(PICTURE)),
        "messages": pa.array(
            [[{"role": "user", "content": content}], [{"role": "user", "content": content[:2]}]], pa.list_(message)
        ),
        "text": [json.dumps([{"role": "user", "content": "<image>\nas text<image>"}]), "a plain question"],
    }
    pq.write_table(pa.table(columns), path)
    with ScriptedEndpoint() as endpoint:
        flags = [f"--input={path}", f"--base_url={endpoint.base_url}", "--model=m", "--num_workers=1"]
        done = run(tmp_path / "out", *flags, code=3)
        run(tmp_path / "text", *flags, "--messages_column=text", code=0)
    assert sent(endpoint) == {"both of": [1, 2], "as text": [1, 2], "a plain question": [1, 2]}
    assert endpoint.requests[0]["messages"][0]["content"][1] == {"type": "text", "text": "both of"}
    [failed] = done.failed
    assert failed["error"]["message"] == "messages: 1 image parts name no picture, and the image columns have 2"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--prompt={captoin}"], "prompt: no column 'captoin'; did you mean 'caption'? the input has 'id', 'image', "),
        (["--prompt=x", "--image_column=photo"], "image_column: no column 'photo'; "),
        (["--messages_column=chat"], "messages_column: no column 'chat'; "),
        ([], "no column 'messages' or 'prompt' to ask: give --prompt or --messages_column; "),
        (["--prompt=x", "--input_format=openai_batch"], "input_format=openai_batch is for JSONL, and "),
        (
            ["--prompt=x", "--output_file_type=parquet", "--output_format=openai_batch"],
            "output_file_type=parquet holds rows",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_a_column_that_is_not_there_is_a_usage_error_before_the_run(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, flags: list[str], says: str
) -> None:
    names = ["id", "image", "caption"]
    if kind == "jsonl" and "openai_batch" in says:
        return
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        shutil.copy(photos, path)
    elif kind == "csv":
        path.write_text(f"{','.join(names)}\n1,a.png,text\n")
    else:
        write_lines(path, b"no json", *[dict.fromkeys(names, "x")] * 3)
    output = tmp_path / "out"
    code = main([f"--input={path}", f"--output={output}", "--base_url=http://localhost:9", "--model=m", *flags])
    assert code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def heavy_jpeg(number: int, size: int = 400_000) -> bytes:
    """A small picture in a large file, unlike every other one."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 256, 0, 0)).save(buffer, "JPEG")
    comment = b"\xff\xfe\xff\xff" + number.to_bytes(4, "big") + bytes(65535 - 6)
    data = buffer.getvalue()
    return data[:2] + comment * (size // len(comment)) + data[2:]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_pictures_in_rows_are_not_in_memory_while_their_requests_wait(tmp_path: Path, kind: str) -> None:
    """800 requests of 0.5 MB are open at once, 420 MB of bodies; they would also be in memory as rows."""
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        cells = pa.array([heavy_jpeg(n) for n in range(800)], pa.binary())
        pq.write_table(pa.table({"image": cells, "prompt": ["what is it"] * 800}), path, row_group_size=50)
    else:
        urls = ("data:image/jpeg;base64," + base64.b64encode(heavy_jpeg(n)).decode() for n in range(800))
        write_lines(path, *({"prompt": "what is it", "image": url} for url in urls))
    flags = ["--base_url=simulated?latency_ms=5000", "--num_workers=1", "--response_store=none"]
    out = ["--output_file_type=parquet"] if kind == "parquet" else []
    with Command(tmp_path / "out", f"--input={path}", *flags, *out) as command:
        peak = 0
        while command.process.poll() is None:
            peak = max(peak, resident_mb(command.process.pid))
            time.sleep(0.05)
        done = command.wait()
    assert done.code == 0
    assert done.summary["completed"] == 800
    assert peak < 400, f"{peak} MB"


def resident_mb(pid: int) -> int:
    """Memory of a process that is its own, in megabytes; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) // 1024
