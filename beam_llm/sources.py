"""Rows of input files, whatever their type: planning the ranges of many files, reading the rows of one range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from beam_llm.delimited import header_of, read_records, split_records
from beam_llm.files import FileRange, FileType, InputError, file_type, is_gzip
from beam_llm.lines import read_lines
from beam_llm.parquet_rows import ParquetRow, count_rows, read_rows, schema_of, split_rows
from beam_llm.records import Shard

_MIN_RANGE, _MAX_RANGE = 16 << 10, 64 << 20
_RANGES = 256
"""Ranges aimed at for a whole input: some for every worker, few enough to shuffle at no cost."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row as it was read.

    Args:
        offset: Its place in the file: a byte, or a number of a row in Parquet.
        data: A line of JSON, or the row of a table.
        weight: Bytes of the file, as stored, that it stands for.
        flaw: Why it makes no request, if that is known already.
    """

    offset: int
    data: bytes | dict[str, Any] | ParquetRow
    weight: int
    flaw: str | None = None


def plan_ranges(files: list[tuple[str, int]], limit: int | None = None) -> list[FileRange]:
    """Ranges that cover every row of the files once.

    Args:
        files: (path, size), as `match_files` gives them. A gzip file is one range.
        limit: Only the first so many rows, in the order of the files; None = all.

    Raises:
        InputError: A file of a type that is not read.
    """
    whole = [FileRange(path, 0, size, file_type=file_type(path)) for path, size in files]
    if limit is not None:
        whole = _first_rows(whole, limit)
    size = min(_MAX_RANGE, max(_MIN_RANGE, sum(part.end or 0 for part in whole) // _RANGES))
    parts = [part for one in whole for part in _split(one, size, cut=limit is not None)]
    return [replace(part, shard=Shard(i, len(parts))) for i, part in enumerate(parts)]


def _split(whole: FileRange, size: int, cut: bool) -> list[FileRange]:
    last = whole.end if cut else None
    if whole.file_type is FileType.PARQUET:
        return [replace(part, file_type=whole.file_type) for part in split_rows(whole.file, last)]
    # The size of a gzip file says nothing about its lines, nor does that of a bucket's object which is unpacked on the
    # way: the last range goes to the end of the file.
    end = whole.end or 0
    if end <= size or is_gzip(whole.file):
        return [replace(whole, end=last)]
    starts = list(range(size, end, size))
    if whole.file_type is FileType.CSV:
        starts = [start for start in split_records(whole.file, starts) if start < end]
    stops = [*starts, last]
    return [replace(whole, start=start, end=stop) for start, stop in zip([0, *starts], stops, strict=True)]


def _first_rows(files: list[FileRange], limit: int) -> list[FileRange]:
    """One range a file that holds the first `limit` rows and no other."""
    left, cut = limit, []
    for whole in files:
        if left <= 0:
            break
        end: int | None = 0
        if whole.file_type is FileType.PARQUET:
            end = min(left, count_rows(whole.file))
            left -= end
        else:
            try:
                for row in read_range(replace(whole, end=None)):
                    end, left = row.offset + 1, left - 1
                    if left == 0:
                        break
            except InputError:
                end = None  # damaged before that many rows: whoever reads it tells so
        cut.append(replace(whole, end=end))
    return cut


def read_range(part: FileRange) -> Iterator[SourceRow]:
    """The rows that begin in a range.

    Raises:
        InputError: The file is damaged; what came before has been yielded.
    """
    if part.file_type is FileType.PARQUET:
        for number, row, weight in read_rows(part):
            yield SourceRow(number, row, weight)
    elif part.file_type is FileType.CSV:
        for record in read_records(part):
            yield SourceRow(record.offset, record.values, record.weight, record.flaw)
    else:
        for line in read_lines(part):
            yield SourceRow(line.offset, line.data, line.weight)


def table_columns(path: str, kind: FileType) -> list[str] | None:
    """The names of a table's columns; None for JSONL, whose rows may each have others."""
    if kind is FileType.PARQUET:
        return list(schema_of(path).names)
    return header_of(path) if kind is FileType.CSV else None
