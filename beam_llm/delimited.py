"""Rows of CSV and TSV files: values by the names of the header, records that span lines, ranges of bytes."""

from __future__ import annotations

import csv
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from beam_llm.files import FileRange, InputError, begins_with_gzip, open_file

_DELIMITERS = ",;\t"
_LONGEST_CELL = min(sys.maxsize, 2**31 - 1)
"""Python's csv refuses cells above 131,072 characters unless told otherwise; a data URL is longer."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a CSV file.

    Args:
        offset: Of its first byte.
        values: By column; an empty cell is None.
        weight: Bytes of the file that it stands for.
        flaw: What is wrong with it; None if nothing is.
    """

    offset: int
    values: dict[str, Any]
    weight: int
    flaw: str | None = None


def header_of(path: str) -> list[str]:
    """The names of the columns.

    Raises:
        InputError: There is no header, two columns have one name, or the file is not UTF-8.
    """
    with _unpacked(path) as file:
        return _header(path, file)[0]


def split_records(path: str, starts: list[int]) -> list[int]:
    """Where records begin, the first one at or behind each of `starts`; those behind the last record are left out.

    A line end within quotes ends no record, and a quote within a cell opens nothing: only reading the file tells.
    """
    places: list[int] = []
    wanted = iter(sorted(starts))
    target = next(wanted, None)
    for record in read_records(FileRange(path)):
        while target is not None and record.offset >= target:
            if not places or places[-1] < record.offset:
                places.append(record.offset)
            target = next(wanted, None)
        if target is None:
            break
    return places


def read_records(part: FileRange) -> Iterator[Record]:
    """The records that begin in a range. A range begins and ends where records begin; see `split_records`.

    Raises:
        InputError: No header, not UTF-8, a damaged gzip file, a quote that is not closed.
    """
    with _unpacked(part.file) as file:
        names, delimiter, offset = _header(part.file, file)
        if part.start > offset:
            file.seek(part.start)
            offset = part.start
        lines = _Lines(file, offset)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        while part.end is None or lines.offset < part.end:
            offset = lines.offset
            try:
                cells, flaw = next(reader, None), None
            except csv.Error as error:
                if lines.ended:
                    message = f"{part.file}: the quote that opens in the row at byte {offset} is not closed"
                    raise InputError(message, offset) from error
                cells, flaw = [], f"the row is no CSV: {error}"
            except (EOFError, OSError, zlib.error) as error:
                raise InputError(f"{part.file}: damaged behind byte {lines.offset}: {error}", lines.offset) from error
            if cells is None:
                return
            if cells or flaw:
                yield _record(offset, names, cells, lines.offset - offset, flaw)


class _Lines(Iterator[str]):
    """Lines as text, and how far they have been read."""

    def __init__(self, file: IO[bytes], offset: int) -> None:
        self._file = file
        self.offset = offset
        self.ended = False

    def __next__(self) -> str:
        line = self._file.readline()
        if not line:
            self.ended = True
            raise StopIteration
        self.offset += len(line)
        return line.decode("utf-8", "surrogateescape")  # what is not UTF-8 costs its own row only


@contextmanager
def _unpacked(path: str) -> Iterator[IO[bytes]]:
    with open_file(path) as raw:
        yield io.BufferedReader(gzip.GzipFile(fileobj=raw)) if begins_with_gzip(raw) else raw


def _header(path: str, file: IO[bytes]) -> tuple[list[str], str, int]:
    """Names, delimiter, and where the first record begins."""
    csv.field_size_limit(_LONGEST_CELL)
    lines = _Lines(file, 0)
    try:
        first = next(lines, "").removeprefix("\ufeff")
        if "\0" in first or "\udcff\udcfe" in first:
            raise InputError(f"{path} is UTF-16; save the file as UTF-8")
        if first.startswith("sep=") and len(first.rstrip()) == len("sep=;"):  # Excel's own mark
            delimiter, first = first[4], next(lines, "")
        else:
            delimiter = max(_DELIMITERS, key=first.count)
        names = next(csv.reader(_Chained(first, lines), delimiter=delimiter, strict=True), [])
    except (EOFError, OSError, zlib.error, csv.Error) as error:
        raise InputError(f"{path}: the header cannot be read: {error}") from error
    if not _is_utf8(names):
        raise InputError(f"{path}: the header is not UTF-8; save the file as UTF-8")
    names = [name.strip() for name in names]
    if not any(names):
        raise InputError(f"{path}: the first line must be a header with the names of the columns")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{path}: two columns of the header are called {twice[0]!r}")
    return names, delimiter, lines.offset


class _Chained(Iterator[str]):
    """A first line, then the others."""

    def __init__(self, first: str, rest: _Lines) -> None:
        self._first: str | None = first
        self._rest = rest

    def __next__(self) -> str:
        first, self._first = self._first, None
        return next(self._rest) if first is None else first


def _record(offset: int, names: list[str], cells: list[str], weight: int, flaw: str | None) -> Record:
    if not _is_utf8(cells):
        cells = [cell.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for cell in cells]
        flaw = flaw or "the row is not UTF-8; save the file as UTF-8"
    values: dict[str, Any] = dict(zip(names, (cell or None for cell in cells), strict=False))
    if len(cells) > len(names):
        values["cells too many"] = cells[len(names) :]
    if flaw is None and len(cells) != len(names):
        flaw = f"the row has {len(cells)} cells, the header {len(names)} columns"
    return Record(offset, values, weight, flaw)


def _is_utf8(cells: list[str]) -> bool:
    text = "".join(cells)
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:  # bytes that the decoder let pass as half surrogate pairs
        return False
