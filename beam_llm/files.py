"""Input files: which ones a pattern names, of which type each is, and the parts of them that workers read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import IO

from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems

from beam_llm.errors import BeamLLMError
from beam_llm.records import Shard

_GZIP_MAGIC = b"\x1f\x8b"
_PARQUET_MAGIC = b"PAR1"

_WAYS_OUT = {
    ".zst": "unpack it first (zstd -d)",
    ".bz2": "unpack it first (bunzip2)",
    ".xz": "unpack it first (unxz)",
    ".zip": "unpack it first (unzip)",
    ".arrow": "write it as Parquet, with Dataset.to_parquet() of Hugging Face datasets",
    ".feather": "write it as Parquet",
    ".xlsx": "save it as CSV",
    ".db": "export a table of it as CSV or Parquet",
}
"""What is often given and is not read, by the end of its name."""


class InputError(BeamLLMError):
    """An input file that cannot be read as a whole; the message names it.

    Args:
        message: What is wrong with which file.
        offset: Where the part begins that cannot be read.
    """

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


class FileType(str, Enum):
    """How rows stand in a file."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class FileRange:
    """The rows of `file` that begin at `start` or later and before `end`; None = up to the end of the file.

    Places are bytes (uncompressed ones for gzip) in JSONL and CSV files, and numbers of rows in Parquet files.
    `shard` is its place among the ranges of the whole input.
    """

    file: str
    start: int = 0
    end: int | None = None
    shard: Shard | None = None
    file_type: FileType = FileType.JSONL


def match_files(patterns: Iterable[str]) -> list[tuple[str, int]]:
    """(path, size in bytes) of every file that matches, each once, patterns in their order, names sorted.

    Raises:
        InputError: A pattern that matches nothing.
    """
    files: dict[str, int] = {}
    for pattern in patterns:
        metadata = FileSystems.match([pattern])[0].metadata_list
        if not metadata:
            raise InputError(f"no file matches {pattern!r}")
        files.update((m.path, m.size_in_bytes) for m in sorted(metadata, key=lambda m: m.path))
    return list(files.items())


def file_type(path: str) -> FileType:
    """The type of a file, by the end of its name; where that says nothing, by its first bytes.

    Raises:
        InputError: A type that is not read; says what to do.
    """
    name = path.lower().removesuffix(".gz")
    for ending, way_out in _WAYS_OUT.items():
        if name.endswith(ending):
            raise InputError(f"{path}: {ending} files are not read; {way_out}")
    if name.endswith((".csv", ".tsv")):
        return FileType.CSV
    if name.endswith((".parquet", ".pq")):
        return FileType.PARQUET
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return FileType.JSONL
    with open_file(path) as raw:
        return FileType.PARQUET if raw.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC else FileType.JSONL


def is_gzip(path: str) -> bool:
    """Whether a file is gzip, by its name or its first bytes."""
    if path.endswith(".gz"):
        return True
    with open_file(path) as raw:
        return begins_with_gzip(raw)


def begins_with_gzip(raw: IO[bytes]) -> bool:
    """Whether the content is gzip, whatever its name; leaves the file at its beginning."""
    magic = raw.read(len(_GZIP_MAGIC))
    raw.seek(0)
    return magic == _GZIP_MAGIC


def open_file(path: str) -> IO[bytes]:
    """Opens a file of any file system that Beam knows, as it is stored.

    Raises:
        InputError: A folder, no permission, gone since it was matched.
    """
    try:
        opened: IO[bytes] = FileSystems.open(path, compression_type=CompressionTypes.UNCOMPRESSED)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    return opened
