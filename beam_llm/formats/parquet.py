"""The `rows` format in Parquet, writing: the columns of the input with their types, and the answer's columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from beam_llm.errors import ConfigError
from beam_llm.formats.common_row import without_data_urls
from beam_llm.formats.row_results import answer_columns, free_name
from beam_llm.jsontext import dumps
from beam_llm.parquet_rows import ParquetRow
from beam_llm.records import Outcome

_GROUP_BYTES = 32 << 20
_GROUP_ROWS = 10_000
"""A row group is written when it has so many bytes or rows; until then it is in memory."""

REST = "input_rest"
"""Column for what does not fit the columns that the first rows of a JSONL file showed, as JSON."""

_TOKENS = ("prompt_tokens", "completion_tokens", "total_tokens")
_USAGE = pa.struct([*((name, pa.int64()) for name in _TOKENS), ("details", pa.string())])
_ERROR = pa.struct(
    [
        *[("kind", pa.string()), ("message", pa.string()), ("status_code", pa.int64()), ("body", pa.string())],
        *[("attempts", pa.int64()), ("source", pa.string()), ("file", pa.string()), ("offset", pa.int64())],
    ]
)
_TEXT = pa.string()
_OURS = {
    "custom_id": _TEXT,
    "answer": _TEXT,
    "reasoning": _TEXT,
    "finish_reason": _TEXT,
    "usage": _USAGE,
    "refusal": _TEXT,
    "tool_calls": _TEXT,
    "logprobs": _TEXT,
    "choices": _TEXT,
    "error": _ERROR,
}
_LARGEST_EXACT = 2**53
"""Integers up to here are doubles too."""

_SIMPLE = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


class TableLayout:
    """The columns of a Parquet output, the same for answers and for failures, and how an outcome fills them.

    Args:
        given: The input's columns, as `input_schema` finds them.
    """

    def __init__(self, given: pa.Schema) -> None:
        self._given = given
        replaced = "custom_id" in given.names and pa.types.is_string(given.field("custom_id").type)
        self._kept = [field for field in given if not (replaced and field.name == "custom_id")]
        fields = [field.with_name(self._name_of(field.name)).with_nullable(True) for field in self._kept]
        ours = [pa.field(column, kind) for column, kind in _OURS.items()]
        self.schema: pa.Schema = pa.schema([*fields, *ours], metadata=given.metadata)
        """The output's columns: those of the input, then ours. Its metadata (pandas, Hugging Face) is the input's."""

    def _name_of(self, column: str) -> str:
        if column == "custom_id":
            return "input_custom_id"  # not text, as ours is
        return free_name(column, self._given.names)

    def rows_of(self, outcomes: list[Outcome]) -> pa.Table:
        """The outcomes as a table."""
        rows = [_as_read(outcome.context) for outcome in outcomes]
        batches = [row for row in rows if isinstance(row, pa.RecordBatch)]
        if len(batches) == len(rows) and all(batch.schema.equals(batches[0].schema) for batch in batches):
            table = pa.Table.from_batches(batches)
            columns = [_as_type(table, field, len(rows)) for field in self._kept]
        else:
            columns = [self._given_column(field, rows) for field in self._kept]
        answers = [answer_columns(outcome) for outcome in outcomes]
        columns += [
            pa.array([_as_column(name, answer.get(name)) for answer in answers], kind) for name, kind in _OURS.items()
        ]
        return pa.Table.from_arrays(columns, schema=self.schema)

    def _given_column(self, field: pa.Field, rows: list[Any]) -> pa.Array | pa.ChunkedArray:
        if field.name == REST:
            return pa.array([self._rest_of(row) for row in rows], field.type)
        return pa.chunked_array([_cell(row, field) for row in rows], field.type)

    def _rest_of(self, row: Any) -> str | None:
        if isinstance(row, pa.RecordBatch):
            return None
        known = {field.name: field for field in self._kept if field.name != REST}
        rest = {
            name: value
            for name, value in row.items()
            if value is not None and (name not in known or not _fits(value, known[name].type))
            if name != "custom_id" or name in known
        }
        return dumps(rest).decode() if rest else None


def _as_read(context: Any) -> Any:
    """The row behind an outcome, once: a batch of Arrow with one row, or a mapping."""
    if isinstance(context, ParquetRow):
        return context.as_batch()
    return {} if context is None else without_data_urls(context if isinstance(context, Mapping) else {"input": context})


def _cell(row: Any, field: pa.Field) -> pa.Array:
    """One row's value of an input column, null where it has none."""
    if not isinstance(row, pa.RecordBatch):
        value = row.get(field.name)
        return pa.array([value if _fits(value, field.type) else None], field.type)
    return _as_type(row, field, 1)


def _as_type(table: Any, field: pa.Field, rows: int) -> Any:
    """A column of a table or batch as the output has it; nulls where there is none."""
    at = table.schema.get_field_index(field.name)
    if at < 0:
        return pa.nulls(rows, field.type)
    column = table.column(at)
    # Types differ where files do, and a wider one was found; not every large integer has its double.
    return column if column.type == field.type else column.cast(field.type, safe=False)


def _fits(value: Any, kind: pa.DataType) -> bool:
    if value is None:
        return True
    if pa.types.is_float64(kind):
        return isinstance(value, float) or (type(value) is int and abs(value) <= _LARGEST_EXACT)
    if pa.types.is_int64(kind):
        return type(value) is int and -(2**63) <= value < 2**63
    if pa.types.is_boolean(kind):
        return isinstance(value, bool)
    if pa.types.is_string(kind):
        return _is_text(value)
    try:
        return pa.array([value], kind) is not None  # a row of JSON beside Parquet files with columns of other types
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return False


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _as_column(name: str, value: Any) -> Any:
    if name == "usage" and value is not None:
        tokens = {key: count for key in _TOKENS if _fits(count := value.get(key), pa.int64())}
        details = {key: item for key, item in value.items() if key not in tokens}
        return {**tokens, "details": _as_json(details or None)}
    if name == "error" and value is not None:
        return {**value, "kind": str(value["kind"]), "body": _as_json(value["body"])}
    return _as_json(value)


def _as_json(value: Any) -> str | None:
    """Text as it is (what UTF-8 cannot say replaced), anything else as JSON."""
    if value is None:
        return None
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else dumps(value).decode()


def input_schema(tables: Mapping[str, pa.Schema], rows: Iterable[Mapping[str, Any]]) -> pa.Schema:
    """The columns that an input gives its Parquet output.

    Args:
        tables: The schema of each Parquet file, by its path.
        rows: The first rows of the other files: their simple columns (text, numbers, truth) become columns; all else
            of their rows goes into the column `input_rest`, as JSON.

    Raises:
        ConfigError: Two files have a column of types that no type holds; names both.
    """
    schema, seen = pa.schema([]), ""
    for path, found in tables.items():
        try:
            unified = pa.unify_schemas([schema, found], promote_options="permissive")
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise ConfigError(f"the columns of {path} do not go together with those of {seen}: {error}") from error
        # What the files do not agree on, such as the names of Hugging Face's class labels, is true of none of them.
        common = found.metadata if not seen else _agreed(schema.metadata, found.metadata)
        schema, seen = unified.with_metadata(common), path
    kinds: dict[str, pa.DataType | None] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                kinds[name] = _common(kinds.get(name, _SIMPLE.get(type(value))), _SIMPLE.get(type(value)))
    given = [*((name, kind) for name, kind in kinds.items() if kind is not None and name not in schema.names)]
    for name, kind in given:
        schema = schema.append(pa.field(name, kind))
    return schema.append(pa.field(REST, _TEXT)) if kinds else schema


def _agreed(one: dict[bytes, bytes] | None, other: dict[bytes, bytes] | None) -> dict[bytes, bytes] | None:
    return {key: value for key, value in (one or {}).items() if (other or {}).get(key) == value} or None


def _common(one: pa.DataType | None, other: pa.DataType | None) -> pa.DataType | None:
    if one == other:
        return one
    return pa.float64() if {one, other} == {pa.int64(), pa.float64()} else None


class RowGroupWriter:
    """A Parquet file that is being written, row group by row group.

    Args:
        file: Open for writing; closing it is up to the caller.
        layout: Its columns.
    """

    def __init__(self, file: IO[bytes], layout: TableLayout) -> None:
        self._layout = layout
        self._writer = pq.ParquetWriter(file, layout.schema, compression="zstd")
        self._tables: list[pa.Table] = []
        self._outcomes: list[Outcome] = []
        self._bytes = self._rows = 0

    def add(self, outcome: Outcome) -> None:
        """Appends a row."""
        self._outcomes.append(outcome)
        if len(self._outcomes) >= 64:
            self._gather()

    def _gather(self) -> None:
        if not self._outcomes:
            return
        table = self._layout.rows_of(self._outcomes)
        self._outcomes = []
        self._tables.append(table)
        self._bytes += table.nbytes
        self._rows += table.num_rows
        if self._bytes >= _GROUP_BYTES or self._rows >= _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._tables:
            self._writer.write_table(pa.concat_tables(self._tables), row_group_size=self._rows)
        self._tables, self._bytes, self._rows = [], 0, 0

    def close(self) -> None:
        """Writes what is left, and the footer."""
        self._gather()
        self._flush()
        self._writer.close()
