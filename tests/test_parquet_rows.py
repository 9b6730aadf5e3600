"""Rows of Parquet files: every row once, cells as they are, pictures left where they are."""

from __future__ import annotations

import datetime
import decimal
import pickle
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from beam_llm import parquet_rows
from beam_llm.errors import RequestError
from beam_llm.files import FileRange, FileType, InputError, match_files
from beam_llm.parquet_rows import CellPicture, ParquetRow, read_rows, schema_of, split_rows
from beam_llm.sources import plan_ranges, read_range
from beam_llm.spill import SpillFile

LARGE = bytes(range(256)) * 400
PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
ODD = pa.table(
    {
        "ns": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")),
        "far": pa.array([4 * 10**17], pa.timestamp("us")),
        "price": pa.array([decimal.Decimal("1.25")], pa.decimal128(9, 2)),
        "label": pa.array(["cat"]).dictionary_encode(),
        "half": pa.array([1.5], pa.float16()),
        "day": pa.array([datetime.date(2026, 12, 1)]),
        "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int8())),
        "deep": pa.array([[{"a": [1, None]}]]),
        "data": pa.array([LARGE], pa.large_binary()),
    }
)


def stored(folder: Path, table: pa.Table, **options: Any) -> str:
    path = folder / "rows.parquet"
    pq.write_table(table, path, **options)
    return str(path)


def row_of(folder: Path, column: Any, kind: pa.DataType | None = None) -> ParquetRow:
    [(_, row, _)] = read_rows(FileRange(stored(folder, pa.table({"image": pa.array([column], kind)}))))
    return row


def pickled(row: ParquetRow) -> ParquetRow:
    again = pickle.loads(pickle.dumps(row))  # noqa: S301 - made here
    assert isinstance(again, ParquetRow)
    return again


@pytest.mark.parametrize("group_rows", [1, 7, 1000, 20_000])
def test_ranges_cover_every_row_once_and_in_order(tmp_path: Path, group_rows: int) -> None:
    count = 5000 if group_rows > 1 else 200
    path = stored(tmp_path, pa.table({"n": range(count)}), row_group_size=group_rows)
    parts = plan_ranges(match_files([path]))
    found = [(number, row["n"]) for part in parts for number, row, _ in read_rows(part)]
    assert found == [(n, n) for n in range(count)]
    assert {part.file_type for part in parts} == {FileType.PARQUET}
    assert len(parts) >= 8, "one row group too is spread over the workers"
    assert [part.shard.index for part in parts if part.shard] == list(range(len(parts)))


@pytest.mark.parametrize("limit", [1, 999, 1000, 1001, 5000, 9999])
def test_a_limit_takes_the_first_rows(tmp_path: Path, limit: int) -> None:
    path = stored(tmp_path, pa.table({"n": range(5000)}), row_group_size=1000)
    parts = plan_ranges(match_files([path]), limit)
    found = [row.offset for part in parts for row in read_range(part)]
    assert found == list(range(min(limit, 5000)))


def test_a_heavy_row_group_is_not_read_many_times_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path, pa.table({"n": range(4000)}))
    assert [(part.start, part.end) for part in split_rows(path)] == [(i * 500, i * 500 + 500) for i in range(8)]
    size = pq.ParquetFile(path).metadata.row_group(0).total_byte_size
    monkeypatch.setattr(parquet_rows, "_REREAD_BYTES", size)
    assert len(split_rows(path)) == 3, "on the average each part is read half as often as there are parts"
    monkeypatch.setattr(parquet_rows, "_REREAD_BYTES", size // 3)
    assert len(split_rows(path)) == 1


@pytest.mark.parametrize("spilled", [False, True])
def test_cells_become_python_values_and_the_row_keeps_its_types(tmp_path: Path, spilled: bool) -> None:
    [(_, row, _)] = read_rows(FileRange(stored(tmp_path, ODD)))
    if spilled:
        row.spill(SpillFile())
    assert row["ns"] == "2023-11-14 22:13:20.123456789"
    assert row["far"].startswith("14645-")
    assert (row["price"], row["label"], row["half"], row["deep"]) == (
        decimal.Decimal("1.25"),
        "cat",
        1.5,
        [{"a": [1, None]}],
    )
    assert list(row) == ODD.schema.names
    for one in (row, pickled(row)):
        assert pa.Table.from_batches([one.as_batch()]).equals(ODD)


def test_text_that_is_not_utf8_fails_where_it_is_asked_for_and_nowhere_else(tmp_path: Path) -> None:
    bad = pa.array([b"caf\xe9"], pa.binary()).view(pa.string())
    deep = pa.StructArray.from_arrays([bad], names=["text"])
    row = ParquetRow(pa.record_batch({"bad": bad, "deep": deep, "good": pa.array(["fine"])}))
    assert row["good"] == "fine"
    for name in ("bad", "deep"):
        with pytest.raises(UnicodeDecodeError):
            row[name]
    assert row.as_dict() == {
        "bad": "caf\\xe9",
        "deep": "… (struct<text: string>)",
        "good": "fine",
    }


def test_a_wide_row_is_unpacked_once_for_all_its_columns() -> None:
    table = pa.table({**{f"c{i}": [i] for i in range(2000)}, "data": [LARGE]})
    row = ParquetRow(table.to_batches()[0])
    row.spill(SpillFile())
    begun_s = time.process_time()
    assert row.as_dict()["c1999"] == 1999
    one_s = time.process_time() - begun_s
    begun_s = time.process_time()
    row["c1999"]
    assert one_s < 100 * (time.process_time() - begun_s) + 0.1


def test_only_large_rows_go_to_disk(tmp_path: Path) -> None:
    spill = SpillFile()
    for _, row, _ in read_rows(FileRange(stored(tmp_path, pa.table({"n": range(100)})))):
        row.spill(spill)
    assert spill.size == 0
    for _, row, _ in read_rows(FileRange(stored(tmp_path, pa.table({"data": [LARGE] * 3})))):
        row.spill(spill)
    assert spill.size == 1 << 17, "and leave it when nobody holds them"


@pytest.mark.parametrize(
    ("cell", "kind", "loaded"),
    [
        (LARGE, pa.binary(), [LARGE]),
        (LARGE, pa.large_binary(), [LARGE]),
        ({"bytes": LARGE, "path": "a.png"}, PICTURE, [{"bytes": LARGE, "path": "a.png"}]),
        ({"bytes": None, "path": "a.png"}, PICTURE, [{"bytes": None, "path": "a.png"}]),
        ([LARGE, b"b"], pa.list_(pa.binary()), [LARGE, b"b"]),
        ([{"bytes": b"a", "path": None}], pa.list_(PICTURE), [{"bytes": b"a", "path": None}]),
        ("a.png", pa.string(), ["a.png"]),
        (["a.png", "b.png"], pa.large_list(pa.string()), ["a.png", "b.png"]),
        ([], pa.list_(PICTURE), []),
    ],
)
def test_pictures_of_every_kind_of_column(tmp_path: Path, cell: Any, kind: pa.DataType, loaded: list[Any]) -> None:
    row = row_of(tmp_path, cell, kind)
    pictures = row.pictures("image")
    assert pictures is not None
    row.spill(SpillFile())
    assert [picture.load() if isinstance(picture, CellPicture) else picture for picture in pictures] == loaded
    assert all(isinstance(picture, (CellPicture, str)) for picture in pictures), "no bytes are held"


def test_a_picture_that_is_null_says_so(tmp_path: Path) -> None:
    assert row_of(tmp_path, None, PICTURE).pictures("image") is None
    first, second = row_of(tmp_path, [LARGE, None], pa.list_(pa.binary())).pictures("image") or []
    assert first.load() == LARGE
    with pytest.raises(RequestError, match=r"column 'image'\[1\] is null"):
        second.load()


@pytest.mark.parametrize("content", [b"", b"PAR1", b'{"a": 1}', b"PAR1" + b"x" * 100 + b"PAR1"])
def test_what_is_no_parquet_file_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.parquet"
    path.write_bytes(content)
    for read in (schema_of, split_rows, lambda name: list(read_rows(FileRange(name)))):
        with pytest.raises(InputError, match=r"bad\.parquet: no Parquet file, or a damaged one"):
            read(str(path))


def test_a_damaged_row_group_is_told_and_the_rows_before_it_are_kept(tmp_path: Path) -> None:
    path = Path(stored(tmp_path, pa.table({"n": range(1000)}), row_group_size=100, compression="none"))
    data = bytearray(path.read_bytes())
    place = pq.ParquetFile(path).metadata.row_group(5).column(0).data_page_offset
    data[place : place + 40] = b"\xff" * 40
    path.write_bytes(data)
    found: list[tuple[int, ParquetRow, int]] = []
    with pytest.raises(InputError, match="damaged"):
        found.extend(read_rows(FileRange(str(path))))
    assert [number for number, _, _ in found] == list(range(500))


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(InputError, match="two columns are called 'a'"):
        schema_of(stored(tmp_path, table))
