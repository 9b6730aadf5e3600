"""ReadRequests and WriteResults: JSONL files, local or in a bucket, to requests and from outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import apache_beam as beam
from apache_beam.coders import BytesCoder
from apache_beam.io.filesystems import FileSystems
from apache_beam.io.textio import WriteToText

from beam_llm import metrics
from beam_llm.errors import ErrorKind, RequestError
from beam_llm.formats import openai_batch, rows
from beam_llm.formats.common_row import as_text, custom_id_of, parse_object
from beam_llm.lines import FileRange, InputError, Line, match_files, plan_ranges, read_lines
from beam_llm.ordered import WriteOrderedShards
from beam_llm.progress import COUNTS, report_progress
from beam_llm.records import ChatRequest, FailedRequest, Origin, Outcome
from beam_llm.transforms import ChatResults


class Format(str, Enum):
    """How a line and a record correspond."""

    OPENAI_BATCH = "openai_batch"
    ROWS = "rows"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class InputFormat:
    """How lines become requests; `columns` matter for `rows` only."""

    format: Format
    columns: rows.RowColumns = field(default_factory=rows.RowColumns)

    def read(self, line: bytes, origin: Origin) -> ChatRequest:
        """The request of a line.

        Raises:
            RequestError: The line makes no request.
        """
        if self.format is Format.OPENAI_BATCH:
            return openai_batch.read_request(line, origin)
        return rows.read_request(line, origin, self.columns)


def detect_format(files: list[tuple[str, int]]) -> Format:
    """The format of the first line there is: a batch line has an object `body` and a `url` or `method`; else rows."""
    for path, _ in files:
        for line in read_lines(FileRange(path)):
            try:
                row = parse_object(line.data)
            except RequestError:
                break  # a bad line gets its own record when the file is read
            batch = isinstance(row.get("body"), dict) and ("url" in row or "method" in row)
            return Format.OPENAI_BATCH if batch else Format.ROWS
    return Format.OPENAI_BATCH


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
            | "ReadLines" >> beam.ParDo(_ReadLines(self._input_format))
        )


class _ReadLines(beam.DoFn):
    def __init__(self, input_format: InputFormat) -> None:
        self._input_format = input_format

    def setup(self) -> None:
        """Lets this worker process show its progress."""
        report_progress()

    def process(self, part: FileRange) -> Iterator[ChatRequest | FailedRequest]:
        """The requests of the lines that begin in a range."""
        try:
            for line in read_lines(part):
                COUNTS.rows += 1
                COUNTS.bytes_read += line.weight
                metrics.count(metrics.ROWS)
                yield self._request(line, Origin(part.file, line.offset, part.shard))
        except InputError as error:
            # The rows behind the damage are unknown; one record says so, and the rows before it are kept.
            origin = Origin(part.file, error.offset, part.shard)
            metrics.count(metrics.ROWS)
            yield FailedRequest(f"{part.file}:damaged", ErrorKind.BAD_INPUT, str(error), origin=origin)

    def _request(self, line: Line, origin: Origin) -> ChatRequest | FailedRequest:
        try:
            return self._input_format.read(line.data, origin)
        except RequestError as error:
            return _bad_line(line.data, origin, error)


def _bad_line(data: bytes, origin: Origin, error: RequestError) -> FailedRequest:
    context: Any = as_text(data)
    custom_id = str(origin)
    try:
        row = parse_object(data)
        context, custom_id = row, custom_id_of(row, origin)
    except RequestError:
        pass  # not even an object: the text is all there is
    return FailedRequest(custom_id, error.kind, error.message, context=context, origin=origin)


_WRITERS: dict[Format, Callable[[Outcome], bytes]] = {
    Format.OPENAI_BATCH: openai_batch.write_outcome,
    Format.ROWS: rows.write_outcome,
}


class WriteResults(beam.PTransform):
    """`ChatResults` -> `completed-*.jsonl` and `failed-*.jsonl` under a folder.

    Args:
        output: Folder, local or of any file system that Beam knows.
        output_format: How a record becomes a line.
        ordered: One shard for each range that was read, whose names and lines follow the input; see `ordered`.
            Else one shard a bundle, lines as they finish.
        failed_name: What the files of failed requests begin with.
    """

    def __init__(
        self, output: str, output_format: Format, *, ordered: bool = False, failed_name: str = "failed"
    ) -> None:
        super().__init__()
        self._failed_name = failed_name
        self._output = output
        self._to_line = _WRITERS[output_format]
        self._ordered = ordered

    def expand(self, results: ChatResults) -> None:
        """One sink for each output, fused with what is before it."""
        for name, outcomes in (("completed", results.completed), (self._failed_name, results.failed)):
            if self._ordered:
                _ = outcomes | f"Write_{name}" >> beam.ParDo(WriteOrderedShards(self._output, name, self._to_line))
            else:
                lines = outcomes | f"Format_{name}" >> beam.Map(self._to_line).with_output_types(bytes)
                _ = lines | f"Write_{name}" >> self._text_sink(name)

    def _text_sink(self, name: str) -> beam.PTransform:
        # The number of shards is left to the runner: naming one would put every record through a shuffle.
        prefix = FileSystems.join(self._output, name)
        return WriteToText(prefix, file_name_suffix=".jsonl", coder=BytesCoder(), skip_if_empty=True)
