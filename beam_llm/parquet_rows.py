"""Rows of Parquet files: ranges of rows, rows whose cells are read when they are asked for, pictures left on disk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from beam_llm.errors import RequestError
from beam_llm.files import FileRange, InputError, open_file
from beam_llm.spill import LARGE_BYTES, Deferred, Spilled, SpillFile

_BATCH_ROWS = 64
_READ_BYTES = 1 << 20
_PARTS = 8
"""Parts of one row group at most: some for every worker of a machine."""

_SMALLEST_PART = 500
_REREAD_BYTES = 2 << 30
"""Whoever reads the end of a row group has to decode its beginning; parts are few enough not to read more than this
once more."""


class ParquetRow(Mapping[str, Any]):
    """One row: the values of its columns, each made a Python value when it is asked for.

    The row itself stays what Arrow read, so that it can be written again with every type as it was.
    """

    __slots__ = ("_batch", "_index", "_schema", "_spilled")

    def __init__(self, batch: pa.RecordBatch, index: int = 0) -> None:
        self._schema: pa.Schema = batch.schema
        self._batch: pa.RecordBatch | None = batch
        self._index = index
        self._spilled: Spilled | None = None

    def __getitem__(self, name: str) -> Any:
        return python_value(self.cell(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._schema.names)

    def __len__(self) -> int:
        return len(self._schema)

    def __repr__(self) -> str:
        return f"ParquetRow({', '.join(self._schema.names)})"

    def cell(self, name: str) -> pa.Scalar:
        """A column's value as Arrow has it.

        Raises:
            KeyError: No such column.
        """
        column = self._schema.get_field_index(name)
        if column < 0:
            raise KeyError(name)
        batch, index = self._located()
        return batch.column(column)[index]

    def as_dict(self) -> dict[str, Any]:
        """All columns as Python values, whatever they hold: text that is not UTF-8 with its bad bytes as `\\xNN`."""
        batch, index = self._located()
        return {name: lenient_value(batch.column(i)[index]) for i, name in enumerate(self._schema.names)}

    def pictures(self, name: str) -> list[Any] | None:
        """The pictures of a column, bytes and structs as `CellPicture` so that they stay where they are; None if null.

        Raises:
            KeyError: No such column.
        """
        cell = self.cell(name)
        if not cell.is_valid:
            return None
        if not _is_list(cell.type):
            return [CellPicture(self, name) if _holds_bytes(cell.type) else python_value(cell)]
        if not _holds_bytes(cell.type.value_type):
            return list(python_value(cell))
        return [CellPicture(self, name, place) for place in range(len(cell.values))]

    def as_batch(self) -> pa.RecordBatch:
        """The row as Arrow has it: a batch of one row."""
        batch, index = self._located()
        return batch.slice(index, 1)

    def spill(self, spill: SpillFile) -> None:
        """Leaves the row on disk if it is large, until it is asked for."""
        if self._batch is None:
            return
        if self._batch.num_rows > 1 and self._batch.nbytes < LARGE_BYTES * self._batch.num_rows:
            return  # a batch of small rows is cheaper in memory
        self._spilled = Spilled(_packed(self.as_batch()), spill)
        self._batch, self._index = None, 0

    def _located(self) -> tuple[pa.RecordBatch, int]:
        if self._batch is not None:
            return self._batch, self._index
        assert self._spilled is not None
        return _unpacked(self._spilled.load()), 0

    def __reduce__(self) -> tuple[Any, ...]:
        # On its way to another process it is the row alone, not the rows that were read with it.
        return _row_again, (_packed(self.as_batch()),)


def _row_again(packed: bytes) -> ParquetRow:
    return ParquetRow(_unpacked(packed))


def _packed(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:  # a stream, since dictionaries have messages of their own
        stream.write_batch(batch)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def _unpacked(packed: bytes | str) -> pa.RecordBatch:
    with pa.ipc.open_stream(pa.py_buffer(packed)) as stream:
        return stream.read_next_batch()


@dataclass(frozen=True, slots=True)
class CellPicture(Deferred):
    """A picture in a cell: bytes, or a struct of `bytes` and `path`.

    Args:
        row, column: Where it stands.
        place: Which of a list of pictures; None if the cell is no list.
    """

    row: ParquetRow
    column: str
    place: int | None = None

    def load(self) -> Any:
        """The bytes, or the struct as a mapping.

        Raises:
            RequestError: It is null.
        """
        cell = self.row.cell(self.column)
        value = python_value(cell if self.place is None else cell.values[self.place])
        if value is None:
            place = "" if self.place is None else f"[{self.place}]"
            raise RequestError(f"column {self.column!r}{place} is null")
        return value


def python_value(cell: pa.Scalar) -> Any:
    """A value for a prompt; what Python cannot hold, such as nanoseconds, as text.

    Raises:
        UnicodeDecodeError: Text that is not UTF-8.
    """
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError, TypeError, NotImplementedError):
        return str(cell) if pa.types.is_nested(cell.type) else str(cell.cast(pa.string()))


def lenient_value(cell: pa.Scalar) -> Any:
    """As `python_value`, for a result that must be written whatever the cell holds."""
    try:
        return python_value(cell)
    except Exception:  # text that is not UTF-8, a time zone that nobody knows: the row has been answered and paid for
        if pa.types.is_string(cell.type) or pa.types.is_large_string(cell.type):
            return cell.cast(pa.binary()).as_py().decode("utf-8", "backslashreplace")
        return f"… ({cell.type})"


def _is_list(kind: pa.DataType) -> bool:
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in tests)


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_holds_bytes(field.type) for field in kind)
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(test(kind) for test in tests)


@contextmanager
def _opened(path: str) -> Iterator[pq.ParquetFile]:
    """The file, its columns read as a stream: a column of pictures may be gigabytes in one row group.

    Arrow reads local files itself: through Python each page would be in memory once more.
    """
    try:
        raw = open_file(path) if "://" in path else pa.OSFile(path)
        with raw, pq.ParquetFile(raw, buffer_size=_READ_BYTES, pre_buffer=False) as file:
            yield file
    except (pa.ArrowException, OSError, EOFError) as error:
        raise InputError(f"{path}: no Parquet file, or a damaged one: {error}"[:500]) from error


def return_arrow_memory() -> None:
    """Lets memory that Arrow frees go back to the system: its own allocators keep that of pages with pictures."""
    pa.set_memory_pool(pa.system_memory_pool())


def schema_of(path: str) -> pa.Schema:
    """The columns of a file and their types.

    Raises:
        InputError: It is no Parquet file, or two columns have one name.
    """
    with _opened(path) as file:
        schema = file.schema_arrow
    if twice := [name for name in schema.names if schema.names.count(name) > 1]:
        raise InputError(f"{path}: two columns are called {twice[0]!r}")
    return schema


def count_rows(path: str) -> int:
    """The rows of a file, by its footer."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


def split_rows(path: str, end: int | None = None) -> list[FileRange]:
    """Ranges of rows: a row group each, and parts of a row group where there are few of them.

    Args:
        path: The file.
        end: Only the rows before this one; None = all.
    """
    with _opened(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    ranges, start = [], 0
    for rows, size in sizes:
        stop = start + rows if end is None else min(end, start + rows)
        step = math.ceil(rows / _parts(rows, size, len(sizes))) if rows else 1
        ranges += [FileRange(path, at, min(at + step, stop)) for at in range(start, stop, step)]
        start += rows
    return ranges


def _parts(rows: int, size: int, groups: int) -> int:
    cheap = 1 + 2 * _REREAD_BYTES // max(size, 1)
    return max(1, min(math.ceil(_PARTS / groups), rows // _SMALLEST_PART, cheap))


def read_rows(part: FileRange) -> Iterator[tuple[int, ParquetRow, int]]:
    """The rows of a range: (number of the row in the file, row, bytes of the file that it stands for).

    Raises:
        InputError: It is no Parquet file, or a damaged one; what came before has been yielded.
    """
    with _opened(part.file) as file:
        begun = 0
        for i in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(i)
            if part.start < begun + group.num_rows and (part.end is None or begun < part.end):
                yield from _group_rows(file, i, begun, part)
            begun += group.num_rows


def _group_rows(file: pq.ParquetFile, i: int, begun: int, part: FileRange) -> Iterator[tuple[int, ParquetRow, int]]:
    group = file.metadata.row_group(i)
    stored = sum(group.column(column).total_compressed_size for column in range(group.num_columns))
    weight = stored // max(group.num_rows, 1)
    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[i], use_threads=False):
        for index in range(max(0, part.start - begun), batch.num_rows):
            if part.end is not None and begun + index >= part.end:
                return
            yield begun + index, ParquetRow(batch, index), weight
        begun += batch.num_rows
