"""ReadRequests and WriteResults: files, local or in a bucket, to requests and from outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.io.filesystems import FileSystems

from beam_llm import metrics
from beam_llm.errors import ErrorKind, RequestError
from beam_llm.files import FileRange, InputError, match_files
from beam_llm.formats import openai_batch, row_results, rows
from beam_llm.formats.common_row import as_text, custom_id_of, parse_object
from beam_llm.formats.parquet import TableLayout
from beam_llm.ordered import WriteOrderedShards
from beam_llm.parquet_rows import ParquetRow, return_arrow_memory
from beam_llm.progress import COUNTS, report_progress
from beam_llm.records import ChatRequest, FailedRequest, Origin, Outcome
from beam_llm.result_sinks import LinesSink, ParquetSink, ResultSink
from beam_llm.sources import SourceRow, plan_ranges, read_range
from beam_llm.spill import LARGE_BYTES, process_spill, spill_large
from beam_llm.transforms import ChatResults


class Format(str, Enum):
    """How a line and a record correspond."""

    OPENAI_BATCH = "openai_batch"
    ROWS = "rows"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class InputFormat:
    """How rows become requests; `columns` matter for `rows` only. Rows of tables are always `rows`."""

    format: Format
    columns: rows.RowColumns = field(default_factory=rows.RowColumns)

    def read(self, data: bytes | Mapping[str, Any], origin: Origin) -> ChatRequest:
        """The request of a line of JSON, or of a table's row.

        Raises:
            RequestError: It makes no request.
        """
        if isinstance(data, ParquetRow):
            request = rows.request_of_row(data, origin, self.columns)
            data.spill(process_spill())
            return replace(request, body=spill_large(request.body, process_spill()))
        row: Any = data
        if isinstance(data, bytes):
            row = parse_object(data)
            if len(data) >= LARGE_BYTES:
                row = spill_large(row, process_spill())
            if self.format is Format.OPENAI_BATCH:
                return openai_batch.request_of_line(row, origin)
        return rows.request_of_row(row, origin, self.columns)


class ReadRequests(beam.PTransform):
    """Files -> `ChatRequest`, or `FailedRequest` of kind `bad_input` for a line that makes none.

    Only byte ranges cross the Reshuffle, never rows: the local runner keeps what is shuffled in memory, and one big
    file still uses every worker.

    Args:
        patterns: Paths or globs, local or of any file system that Beam knows.
        input_format: How lines become requests.
        limit: Only the first so many rows; None = all.
    """

    def __init__(self, patterns: list[str], input_format: InputFormat, limit: int | None = None) -> None:
        super().__init__()
        self._patterns = patterns
        self._input_format = input_format
        self._limit = limit

    def expand(self, pbegin: Any) -> beam.PCollection[ChatRequest | FailedRequest]:
        """Plans ranges, spreads them over the workers, reads their lines."""
        limit = self._limit
        return (
            pbegin
            | "Patterns" >> beam.Create([self._patterns], reshuffle=False)
            | "PlanRanges" >> beam.FlatMap(lambda patterns: plan_ranges(match_files(patterns), limit))
            | "SpreadRanges" >> beam.Reshuffle()
            | "ReadRows" >> beam.ParDo(_ReadRows(self._input_format))
        )


class _ReadRows(beam.DoFn):
    def __init__(self, input_format: InputFormat) -> None:
        self._input_format = input_format

    def setup(self) -> None:
        """Lets this worker process show its progress."""
        report_progress()
        return_arrow_memory()

    def process(self, part: FileRange) -> Iterator[ChatRequest | FailedRequest]:
        """The requests of the rows that begin in a range."""
        try:
            for row in read_range(part):
                COUNTS.rows += 1
                COUNTS.bytes_read += row.weight
                metrics.count(metrics.ROWS)
                yield self._request(row, Origin(part.file, row.offset, part.shard))
        except InputError as error:
            # The rows behind the damage are unknown; one record says so, and the rows before it are kept.
            origin = Origin(part.file, error.offset, part.shard)
            metrics.count(metrics.ROWS)
            yield FailedRequest(f"{part.file}:damaged", ErrorKind.BAD_INPUT, str(error), origin=origin)

    def _request(self, row: SourceRow, origin: Origin) -> ChatRequest | FailedRequest:
        try:
            if row.flaw is not None:
                raise RequestError(row.flaw)
            return self._input_format.read(row.data, origin)
        except RequestError as error:
            return _bad_row(row.data, origin, error)
        except (ValueError, TypeError, ArithmeticError, LookupError, pa.ArrowException) as error:
            # A value that nobody thought of costs its own row.
            return _bad_row(row.data, origin, RequestError(f"the row cannot be used ({type(error).__name__}: {error})"))


def _bad_row(data: bytes | Mapping[str, Any], origin: Origin, error: RequestError) -> FailedRequest:
    context: Any = data
    custom_id = str(origin)
    try:
        context = parse_object(data) if isinstance(data, bytes) else data
        custom_id = custom_id_of(context, origin)
    except RequestError:
        context = as_text(data) if isinstance(data, bytes) else data  # no object: the text is all there is
    if isinstance(context, ParquetRow):
        context.spill(process_spill())
    return FailedRequest(custom_id, error.kind, error.message, context=context, origin=origin)


_WRITERS: dict[Format, Callable[[Outcome], bytes]] = {
    Format.OPENAI_BATCH: openai_batch.write_outcome,
    Format.ROWS: row_results.write_outcome,
}


class WriteResults(beam.PTransform):
    """`ChatResults` -> `completed-*` and `failed-*` under a folder.

    Args:
        output: Folder, local or of any file system that Beam knows.
        output_format: How a record becomes a line.
        given: Columns of the input (see `formats.parquet.input_schema`), to write Parquet with them and those of
            `rows`. None: JSONL.
        ordered: One shard for each range that was read, whose names and rows follow the input; see `ordered`.
            Else one shard a bundle, rows as they finish.
        failed_name: What the files of failed requests begin with.
        completed: Whether completed requests are written; where nothing is sent there are none, and the files of an
            earlier run stay.
    """

    def __init__(
        self,
        output: str,
        output_format: Format,
        *,
        given: pa.Schema | None = None,
        ordered: bool = False,
        failed_name: str = "failed",
        completed: bool = True,
    ) -> None:
        super().__init__()
        self._output = output
        self._output_format = output_format
        self._given = given
        self._ordered = ordered
        self._failed_name = failed_name
        self._completed = completed

    def expand(self, results: ChatResults) -> None:
        """One sink for each output, fused with what is before it."""
        outputs = [(self._failed_name, results.failed)]
        if self._completed:
            outputs.append(("completed", results.completed))
        for name, outcomes in outputs:
            sink = self._sink(name)
            if self._ordered:
                _ = outcomes | f"Write_{name}" >> beam.ParDo(WriteOrderedShards(self._output, name, sink))
            else:
                _ = outcomes | f"Write_{name}" >> sink.unordered(FileSystems.join(self._output, name))

    def _sink(self, name: str) -> ResultSink:
        if self._given is not None:
            return ParquetSink(TableLayout(self._given), even_if_empty=name == "completed")
        return LinesSink(_WRITERS[self._output_format])
