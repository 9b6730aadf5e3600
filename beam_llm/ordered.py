"""Result files in the order of the input, without a shuffle: one shard for each byte range that was read.

A bundle reads its ranges one after the other and answers come as they finish, so each bundle keeps its lines in a local
file, remembers where each one stands, and writes the shards of its ranges at its end. What it holds in memory is some
30 bytes a row; a GroupByKey would hold the rows themselves (on the local runner about five times their size).
"""

from __future__ import annotations

import tempfile
import uuid
from array import array
from collections.abc import Iterator
from typing import IO

import apache_beam as beam
from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems

from beam_llm.records import Outcome, Shard
from beam_llm.result_sinks import ResultSink


class SpilledLines:
    """Lines of one shard in the order in which they came, to be read back in the order of their offsets."""

    def __init__(self) -> None:
        # Typed arrays: a row costs 20 bytes, tuples in a list would cost 150.
        self._offsets = array("Q")
        self._starts = array("Q")
        self._lengths = array("L")

    def add(self, offset: int, line: bytes, spill: IO[bytes]) -> None:
        """Appends a line to the bundle's file."""
        self._offsets.append(offset)
        self._starts.append(spill.tell())
        self._lengths.append(len(line))
        spill.write(line)

    def in_order(self, spill: IO[bytes]) -> Iterator[bytes]:
        """The lines by offset; those of one offset in the order in which they came."""
        for i in sorted(range(len(self._offsets)), key=self._offsets.__getitem__):
            spill.seek(self._starts[i])
            yield spill.read(self._lengths[i])


class WriteOrderedShards(beam.DoFn):
    """Outcomes -> `<name>-NNNNN-of-MMMMM.jsonl` (or `.parquet`), whose names and rows, in order, follow the input.

    Needs all rows of a range in one bundle: that holds from `ReadRequests` on as long as nothing is shuffled between.
    A bundle that is replayed writes the same shards again under the same names.

    Args:
        output: Folder, local or of any file system that Beam knows.
        name: `completed` or `failed`.
        sink: What the files are like.
    """

    def __init__(self, output: str, name: str, sink: ResultSink) -> None:
        self._output = output
        self._name = name
        self._sink = sink
        self._spill: IO[bytes] | None = None

    def start_bundle(self) -> None:
        """Starts an empty spill file; that of a failed bundle goes."""
        self.teardown()
        self._spill = tempfile.TemporaryFile(prefix="beam_llm-ordered-")  # noqa: SIM115 - a bundle is no `with` block
        self._shards: dict[Shard, SpilledLines] = {}

    def teardown(self) -> None:
        """Lets go of what a failed bundle left."""
        if self._spill is not None:
            self._spill.close()
            self._spill = None

    def process(self, outcome: Outcome) -> None:
        """Keeps one line."""
        origin = outcome.origin
        if origin is None or origin.shard is None:
            raise ValueError(f"ordered results need rows that ReadRequests has read; {outcome.custom_id!r} was not")
        assert self._spill is not None, "start_bundle() has not been called"
        lines = self._shards.setdefault(origin.shard, SpilledLines())
        lines.add(origin.offset, self._sink.to_bytes(outcome), self._spill)

    def finish_bundle(self) -> None:
        """Writes the shards of this bundle's ranges."""
        assert self._spill is not None, "start_bundle() has not been called"
        for shard, lines in self._shards.items():
            self._write(shard, lines.in_order(self._spill))
        self.teardown()

    def _write(self, shard: Shard, lines: Iterator[bytes]) -> None:
        final = FileSystems.join(
            self._output, f"{self._name}-{shard.index:05d}-of-{shard.count:05d}{self._sink.suffix}"
        )
        # Renamed when it is whole, so that nobody reads half a shard.
        partial = FileSystems.join(self._output, f".{self._name}-{shard.index:05d}-{uuid.uuid4().hex}")
        with FileSystems.create(partial, self._sink.mime_type, CompressionTypes.UNCOMPRESSED) as file:
            self._sink.write(lines, file)
        if FileSystems.exists(final):
            FileSystems.delete([final])
        FileSystems.rename([partial], [final])
