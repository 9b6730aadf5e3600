"""Outcomes to the columns of a Parquet output."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from beam_llm.errors import ConfigError
from beam_llm.formats.parquet import TableLayout, input_schema
from beam_llm.parquet_rows import ParquetRow
from beam_llm.records import Completion
from tests.test_formats import ANSWER


def test_parquet_metadata_that_files_do_not_agree_on_is_left_out() -> None:
    """Class labels, for one: the same number is another label in each file."""
    first, second = (
        pa.schema([("a", kind)], {"huggingface": names, "same": "x"})
        for kind, names in ((pa.int32(), "cat, dog"), (pa.int64(), "dog, cat"))
    )
    found = input_schema({"a.parquet": first, "b.parquet": second}, [])
    assert found == pa.schema([("a", pa.int64())])
    assert found.metadata == {b"same": b"x"}
    assert input_schema({"a.parquet": first}, []).metadata == first.metadata
    with pytest.raises(ConfigError, match=r"the columns of b\.parquet do not go together with those of a\.parquet"):
        input_schema({"a.parquet": first, "b.parquet": pa.schema([("a", pa.string())])}, [])


def test_rows_of_every_kind_fill_the_columns_of_one_parquet_output() -> None:
    """Parquet rows of differing files, and JSON beside them, some of it not of the columns' types."""
    schema = pa.schema([("n", pa.int64()), ("x", pa.float64()), ("d", pa.date32()), ("input_rest", pa.string())])
    layout = TableLayout(schema)
    narrow = pa.record_batch({"n": pa.array([1], pa.int8()), "x": pa.array([2**60 + 1])})
    contexts = [
        ParquetRow(narrow),
        ParquetRow(pa.record_batch({"n": [2], "d": pa.array([3], pa.date32())})),
        {"n": 2**70, "x": 2**60 + 1, "d": "today", "more": [1], "custom_id": "given"},
        {"n": True, "x": 5, "d": None},
        None,
        "a line that was no object",
    ]
    table = layout.rows_of([Completion("r", ANSWER, context=context) for context in contexts])
    assert table["n"].to_pylist() == [1, 2, None, None, None, None]
    assert table["x"].to_pylist() == [float(2**60 + 1), None, None, 5.0, None, None]
    assert [None if day is None else day.isoformat() for day in table["d"].to_pylist()][:3] == [
        None,
        "1970-01-04",
        None,
    ]
    rest = [json.loads(text or "null") for text in table["input_rest"].to_pylist()]
    assert rest[:2] == [None, None]
    assert rest[2:] == [
        {"n": 2**70, "x": 2**60 + 1, "d": "today", "more": [1]},
        {"n": True},
        None,
        {"input": "a line that was no object"},
    ]
    assert set(table["answer"].to_pylist()) == {"4"}
