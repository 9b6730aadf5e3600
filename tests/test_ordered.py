from __future__ import annotations

import random
from pathlib import Path

import apache_beam as beam
import orjson
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from beam_llm.errors import ErrorKind
from beam_llm.formats import openai_batch
from beam_llm.io import Format, WriteResults
from beam_llm.ordered import WriteOrderedShards
from beam_llm.records import Completion, FailedRequest, Origin, Outcome, Shard
from beam_llm.result_sinks import LinesSink
from beam_llm.runner import settle_runner
from beam_llm.transforms import ChatResults


def completion(offset: int, shard: Shard | None) -> Completion:
    return Completion(str(offset), {"choices": []}, origin=Origin("f", offset, shard))


def write(outcomes: list[Outcome], output: Path) -> None:
    """One bundle, by hand."""
    dofn = WriteOrderedShards(str(output), "completed", LinesSink(openai_batch.write_outcome))
    dofn.start_bundle()
    try:
        for outcome in outcomes:
            dofn.process(outcome)
        dofn.finish_bundle()
    finally:
        dofn.teardown()


def ids(path: Path) -> list[int]:
    return [int(orjson.loads(line)["custom_id"]) for line in path.read_bytes().splitlines()]


def test_shards_and_their_lines_follow_the_input_whatever_order_answers_come_in(tmp_path: Path) -> None:
    outcomes: list[Outcome] = [completion(i, Shard(i // 100, 5)) for i in range(500)]
    random.Random(1).shuffle(outcomes)
    write(outcomes, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"completed-{i:05d}-of-00005.jsonl" for i in range(5)]
    assert [i for name in names for i in ids(tmp_path / name)] == list(range(500))


def test_a_replayed_bundle_writes_the_same_shards_once(tmp_path: Path) -> None:
    """C62: the second try of a bundle replaces what the first one wrote."""
    outcomes: list[Outcome] = [completion(i, Shard(0, 1)) for i in range(10)]
    write(outcomes[:7], tmp_path)
    write(outcomes, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["completed-00000-of-00001.jsonl"]
    assert ids(tmp_path / "completed-00000-of-00001.jsonl") == list(range(10))


def test_a_failed_bundle_leaves_no_shard(tmp_path: Path) -> None:
    dofn = WriteOrderedShards(str(tmp_path), "completed", LinesSink(openai_batch.write_outcome))
    dofn.start_bundle()
    dofn.process(completion(1, Shard(0, 1)))
    dofn.start_bundle()
    dofn.finish_bundle()
    assert list(tmp_path.iterdir()) == []


def test_rows_that_were_not_read_by_ranges_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ReadRequests"):
        write([completion(1, None)], tmp_path)


def test_completed_and_failed_go_to_files_of_their_own(tmp_path: Path) -> None:
    options = PipelineOptions(["--num_workers=1"])
    settle_runner(options)
    with beam.Pipeline(options=options) as pipeline:
        completed = pipeline | "C" >> beam.Create([completion(i, Shard(0, 1)) for i in (4, 2, 0)], reshuffle=False)
        failures = [FailedRequest(str(i), ErrorKind.TIMEOUT, "m", origin=Origin("f", i, Shard(0, 1))) for i in (3, 1)]
        failed = pipeline | "F" >> beam.Create(failures, reshuffle=False)
        ChatResults(completed, failed) | WriteResults(str(tmp_path), Format.OPENAI_BATCH, ordered=True)
    assert ids(tmp_path / "completed-00000-of-00001.jsonl") == [0, 2, 4]
    assert ids(tmp_path / "failed-00000-of-00001.jsonl") == [1, 3]
