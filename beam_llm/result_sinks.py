"""Files of results: JSONL and Parquet sinks, for Beam's file sinks and for ordered shards."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import IO, Any

import apache_beam as beam
from apache_beam.coders import BytesCoder
from apache_beam.io.filebasedsink import FileBasedSink
from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.iobase import Write
from apache_beam.io.textio import WriteToText

from beam_llm.formats.parquet import RowGroupWriter, TableLayout
from beam_llm.records import Outcome


class ResultSink(ABC):
    """What one kind of result file is like."""

    suffix: str
    mime_type: str

    @abstractmethod
    def to_bytes(self, outcome: Outcome) -> bytes:
        """An outcome on its way to an ordered shard."""

    @abstractmethod
    def write(self, rows: Iterable[bytes], file: IO[bytes]) -> None:
        """Writes a whole file of what `to_bytes` made."""

    @abstractmethod
    def unordered(self, prefix: str) -> beam.PTransform:
        """Outcomes -> files that begin with a prefix, one a bundle; the runner chooses how many."""


class LinesSink(ResultSink):
    """JSONL.

    Args:
        to_line: Makes a line, without its end, of an outcome.
    """

    suffix = ".jsonl"
    mime_type = "text/plain"

    def __init__(self, to_line: Callable[[Outcome], bytes]) -> None:
        self._to_line = to_line

    def to_bytes(self, outcome: Outcome) -> bytes:
        """A line with its end."""
        return self._to_line(outcome) + b"\n"

    def write(self, rows: Iterable[bytes], file: IO[bytes]) -> None:
        """Writes lines."""
        for row in rows:
            file.write(row)

    def unordered(self, prefix: str) -> beam.PTransform:
        """Beam's own text sink."""
        return _WriteLines(self._to_line, prefix)


class _WriteLines(beam.PTransform):
    def __init__(self, to_line: Callable[[Outcome], bytes], prefix: str) -> None:
        super().__init__()
        self._to_line = to_line
        self._prefix = prefix

    def expand(self, outcomes: beam.PCollection[Outcome]) -> Any:
        # The number of shards is left to the runner: naming one would put every record through a shuffle.
        sink = WriteToText(self._prefix, file_name_suffix=LinesSink.suffix, coder=BytesCoder(), skip_if_empty=True)
        return outcomes | "Format" >> beam.Map(self._to_line).with_output_types(bytes) | "Write" >> sink


class ParquetSink(ResultSink):
    """Parquet.

    Args:
        layout: The columns.
        even_if_empty: Whether there is a file, with the columns and no rows, when there are no outcomes.
    """

    suffix = ".parquet"
    mime_type = "application/vnd.apache.parquet"

    def __init__(self, layout: TableLayout, *, even_if_empty: bool = False) -> None:
        self._layout = layout
        self._even_if_empty = even_if_empty

    def to_bytes(self, outcome: Outcome) -> bytes:
        """The outcome, pickled: its row keeps its types."""
        return pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)

    def write(self, rows: Iterable[bytes], file: IO[bytes]) -> None:
        """Writes row groups."""
        writer = RowGroupWriter(file, self._layout)
        for row in rows:
            writer.add(pickle.loads(row))  # noqa: S301 - what `to_bytes` wrote, in this process
        writer.close()

    def unordered(self, prefix: str) -> beam.PTransform:
        """Beam's file sink, which moves whole files into place at the end."""
        return Write(_FileSink(prefix, self._layout, skip_if_empty=not self._even_if_empty))


class _FileSink(FileBasedSink):
    def __init__(self, prefix: str, layout: TableLayout, *, skip_if_empty: bool) -> None:
        super().__init__(
            prefix,
            coder=None,
            file_name_suffix=ParquetSink.suffix,
            mime_type=ParquetSink.mime_type,
            compression_type=CompressionTypes.UNCOMPRESSED,
            skip_if_empty=skip_if_empty,
        )
        self._layout = layout

    def open(self, temp_path: str) -> tuple[IO[bytes], RowGroupWriter]:
        """Begins a file."""
        file = super().open(temp_path)
        return file, RowGroupWriter(file, self._layout)

    def write_record(self, file_handle: tuple[IO[bytes], RowGroupWriter], value: Outcome) -> None:
        """Appends a row."""
        file_handle[1].add(value)

    def close(self, file_handle: tuple[IO[bytes], RowGroupWriter] | None) -> None:
        """Ends the file."""
        if file_handle is not None:
            file, writer = file_handle
            writer.close()
            file.close()
