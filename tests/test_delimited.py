"""CSV and TSV files: every record once, whatever is in its cells and wherever ranges begin."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beam_llm import sources
from beam_llm.delimited import Record, header_of, read_records, split_records
from beam_llm.files import FileRange, InputError, match_files
from beam_llm.sources import SourceRow, plan_ranges, read_range

cells = st.text(st.sampled_from('ab",;\n\r\t é\U0001f600'), max_size=6)
tables = st.lists(st.tuples(cells, cells, cells), max_size=25)


def stored(folder: Path, content: str | bytes, name: str = "rows.csv") -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def records(path: str) -> list[Record]:
    return list(read_records(FileRange(path)))


def rows(path: str) -> list[dict[str, str | None]]:
    return [record.values for record in records(path)]


def values(row: SourceRow) -> dict[str, str]:
    assert isinstance(row.data, dict)
    return row.data


@given(tables, st.sampled_from(["\n", "\r\n"]), st.integers(1, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_ranges_give_what_pythons_csv_reads_from_the_whole(
    tmp_path: Path, table: list[tuple[str, ...]], line_end: str, range_bytes: int
) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=line_end, quoting=csv.QUOTE_ALL)
    writer.writerows([("x", "y", "z"), *table])
    path = stored(tmp_path, text.getvalue())
    expected = [tuple(cell or None for cell in row) for row in table]
    whole = records(path)
    assert [tuple(record.values.values()) for record in whole] == expected
    starts = split_records(path, list(range(range_bytes, len(text.getvalue().encode()), range_bytes)))
    assert starts == sorted(set(starts))
    assert set(starts) <= {record.offset for record in whole}
    parts = [FileRange(path, start, end) for start, end in zip([0, *starts], [*starts, None], strict=True)]
    assert [record for part in parts for record in read_records(part)] == whole


@pytest.mark.parametrize(
    ("content", "row"),
    [
        ("a,b\n1,2\n", {"a": "1", "b": "2"}),
        ("a;b\n1,5;2\n", {"a": "1,5", "b": "2"}),
        ("a\tb\n1\t2", {"a": "1", "b": "2"}),
        ("\ufeffa,b\r\n1,2\r\n", {"a": "1", "b": "2"}),
        (' a , b \n"1\n,2",\n', {"a": "1\n,2", "b": None}),
        ('"a\nb",c\n\n1,2\n', {"a\nb": "1", "c": "2"}),
        ('a,b\n5" tall,2\n', {"a": '5" tall', "b": "2"}),
        ("sep=;\na,b;c\n1;2\n", {"a,b": "1", "c": "2"}),
        ("a\n" + "x" * 200_000, {"a": "x" * 200_000}),
    ],
)
def test_a_record_has_its_cells_by_the_names_of_the_header(
    tmp_path: Path, content: str, row: dict[str, str | None]
) -> None:
    for name, data in (("rows.csv", content.encode()), ("rows.csv.gz", gzip.compress(content.encode()))):
        [record] = records(stored(tmp_path, data, name))
        assert (record.values, record.flaw) == (row, None)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"1", "the row has 1 cells, the header 2 columns"),
        (b"1,2,3", "the row has 3 cells, the header 2 columns"),
        (b'"1"x,2', "the row is no CSV: "),
        (b"caf\xe9,2", "the row is not UTF-8; save the file as UTF-8"),
    ],
)
def test_a_flaw_costs_its_own_row_only(tmp_path: Path, line: bytes, reason: str) -> None:
    good, bad, last = records(stored(tmp_path, b"a,b\n1,2\n" + line + b"\n3,4\n"))
    assert (bad.flaw or "").startswith(reason)
    assert [good.values, last.values] == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert (good.flaw, last.flaw) == (None, None)
    assert bad.values.get("cells too many") == (["3"] if line == b"1,2,3" else None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the first line must be a header"),
        (b",,\n1,2,3\n", "the first line must be a header"),
        (b"a,a\n1,2\n", "two columns of the header are called 'a'"),
        ("a,b\n1,2\n".encode("utf-16"), "is UTF-16; save the file as UTF-8"),
        (b"caf\xe9\n1\n", "the header is not UTF-8"),
    ],
)
def test_a_header_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = stored(tmp_path, content)
    with pytest.raises(InputError, match=reason) as raised:
        header_of(path)
    assert path in str(raised.value)


def test_a_quote_that_is_not_closed_is_told_with_its_place_and_what_came_before_is_kept(tmp_path: Path) -> None:
    path = stored(tmp_path, 'a,b\n1,2\n"3,4\n5,6\n')
    found: list[Record] = []
    with pytest.raises(InputError, match="the quote that opens in the row at byte 8 is not closed"):
        found.extend(read_records(FileRange(path)))
    assert [record.values for record in found] == [{"a": "1", "b": "2"}]


def test_a_big_file_is_spread_over_ranges_and_a_limit_takes_the_first_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path, "n,t\n" + "".join(f'{i},"a\n{i}"\n' for i in range(5000)))
    monkeypatch.setattr(sources, "_MIN_RANGE", 1000)
    parts = plan_ranges(match_files([path]))
    assert len(parts) > 20
    assert [values(row)["n"] for part in parts for row in read_range(part)] == [str(i) for i in range(5000)]
    first = plan_ranges(match_files([path]), limit=1234)
    assert [values(row)["n"] for part in first for row in read_range(part)] == [str(i) for i in range(1234)]
