"""A look at the input before the run: its format, columns that are missing, the columns of a Parquet output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pyarrow as pa

from beam_llm.errors import ConfigError, RequestError
from beam_llm.files import FileRange, FileType, InputError, file_type
from beam_llm.formats.common_row import parse_object
from beam_llm.formats.parquet import input_schema
from beam_llm.formats.rows import RowColumns, missing_column
from beam_llm.io import Format
from beam_llm.parquet_rows import schema_of
from beam_llm.sources import SourceRow, read_range, table_columns

_FIRST_ROWS = 100
_FIRST_TABLES = 100
_READERS = 32
"""Footers read side by side: hides a bucket's latency."""


class Preview:
    """The first rows and the columns of an input.

    Args:
        files: (path, size), as `match_files` gives them.

    Raises:
        InputError: A file of a type that is not read.
    """

    def __init__(self, files: list[tuple[str, int]]) -> None:
        self._types = {path: file_type(path) for path, _ in files}

    def format(self, asked: Format | None) -> Format:
        """The format asked for; else that of the first line of JSON: a batch line has an object `body` and a `url` or
        `method`. All else is rows.

        Raises:
            ConfigError: Tables were said to be batch lines.
            InputError: A file is a JSON array.
        """
        if tables := self._of(FileType.PARQUET, FileType.CSV):
            if asked is Format.OPENAI_BATCH:
                raise ConfigError(f"input_format=openai_batch is for JSONL, and {tables[0]} is a table; leave it out")
            return Format.ROWS
        if asked is not None:
            return asked
        for row in self._json_rows():
            batch = isinstance(row.get("body"), dict) and ("url" in row or "method" in row)
            return Format.OPENAI_BATCH if batch else Format.ROWS
        return Format.OPENAI_BATCH

    def check_columns(self, columns: RowColumns) -> None:
        """Refuses columns that an input in `rows` format does not have.

        Raises:
            ConfigError: A column that the flags name is in no row that was looked at, or there is nothing to ask.
            InputError: A table that cannot be read.
        """
        for path in self._of(FileType.PARQUET, FileType.CSV)[:_FIRST_TABLES]:
            names = table_columns(path, self._types[path]) or []
            if flaw := missing_column(columns, [dict.fromkeys(names)]):
                raise ConfigError(f"{flaw} ({path})")
        if flaw := missing_column(columns, self._json_rows()):
            raise ConfigError(flaw)

    def columns(self) -> pa.Schema:
        """The columns of a Parquet output that are the input's; see `input_schema`."""
        tables = self._of(FileType.PARQUET)
        with ThreadPoolExecutor(_READERS) as readers:
            schemas = dict(zip(tables, readers.map(schema_of, tables), strict=True))
        return input_schema(schemas, chain(self._rows_of(FileType.CSV), self._json_rows()))

    def _of(self, *types: FileType) -> list[str]:
        return [path for path, kind in self._types.items() if kind in types]

    def _json_rows(self) -> Iterator[Mapping[str, Any]]:
        return self._rows_of(FileType.JSONL)

    def _rows_of(self, kind: FileType) -> Iterator[Mapping[str, Any]]:
        """The first rows that are any; what is wrong with others, their own records will say."""
        left = _FIRST_ROWS
        for path in self._of(kind):
            rows = read_range(FileRange(path, file_type=kind))
            while left and (row := self._next(rows, kind)) is not None:
                left -= 1
                if isinstance(row.data, bytes):
                    _refuse_array(path, row.data)
                try:
                    yield parse_object(row.data) if isinstance(row.data, bytes) else row.data
                except RequestError:
                    continue

    @staticmethod
    def _next(rows: Iterator[SourceRow], kind: FileType) -> SourceRow | None:
        """The next row; None at the end, or where a file of lines is damaged."""
        try:
            return next(rows, None)
        except InputError:
            if kind is FileType.CSV:
                raise
            return None


def _refuse_array(path: str, line: bytes) -> None:
    start = line.lstrip()[:2].strip()
    if start in (b"[", b"[{", b"[["):
        raise InputError(f"{path} is a JSON array; make it JSONL, an object a line: jq -c '.[]' {path} > rows.jsonl")
