"""Lines of JSONL files by byte ranges: planning the ranges of many files, reading the lines that begin in one."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import IO

from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems

from beam_llm.errors import BeamLLMError
from beam_llm.records import Shard

_MIN_RANGE, _MAX_RANGE = 16 << 10, 64 << 20
_RANGES = 256
"""Ranges aimed at for a whole input: some for every worker, few enough to shuffle at no cost."""

_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


class InputError(BeamLLMError):
    """An input file that cannot be read as a whole; the message names it.

    Args:
        message: What is wrong with which file.
        offset: Where the part begins that cannot be read.
    """

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


@dataclass(frozen=True, slots=True)
class FileRange:
    """The lines of `file` that begin at `start` or later and before `end`; None = up to the end of the file.

    `shard` is its place among the ranges of the whole input.
    """

    file: str
    start: int = 0
    end: int | None = None
    shard: Shard | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its line end, and the offset of its first byte."""

    offset: int
    data: bytes
    weight: int
    """Bytes of the file, as stored, that it stands for, blank lines before it included."""


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


def plan_ranges(files: list[tuple[str, int]], limit: int | None = None) -> list[FileRange]:
    """Ranges that cover every line of the files once.

    Args:
        files: (path, size), as `match_files` gives them. A `.gz` file is one range.
        limit: Only the first so many rows, in the order of the files; None = all.
    """
    whole = [FileRange(path, 0, size) for path, size in files] if limit is None else _first_rows(files, limit)
    size = min(_MAX_RANGE, max(_MIN_RANGE, sum(part.end or 0 for part in whole) // _RANGES))
    parts = [part for one in whole for part in _split(one, size, cut=limit is not None)]
    return [replace(part, shard=Shard(i, len(parts))) for i, part in enumerate(parts)]


def _split(whole: FileRange, size: int, cut: bool) -> list[FileRange]:
    # The size of a gzip file says nothing about its lines, nor does that of a bucket's object which is unpacked on the
    # way: the last range goes to the end of the file.
    end = whole.end or 0
    last = whole.end if cut else None
    if end <= size or is_gzip(whole.file):
        return [replace(whole, end=last)]
    starts = range(0, end, size)
    return [FileRange(whole.file, start, start + size if start + size < end else last) for start in starts]


def _first_rows(files: list[tuple[str, int]], limit: int) -> list[FileRange]:
    """One range a file that holds the first `limit` rows and no other."""
    left, cut = limit, []
    for path, _ in files:
        if left <= 0:
            break
        end: int | None = 0
        try:
            for line in read_lines(FileRange(path)):
                end, left = line.offset + 1, left - 1
                if left == 0:
                    break
        except InputError:
            end = None  # damaged before that many rows: whoever reads it tells so
        cut.append(FileRange(path, 0, end))
    return cut


def is_gzip(path: str) -> bool:
    """Whether a file is gzip, by its name or its first bytes."""
    if path.endswith(".gz"):
        return True
    with _open(path) as raw:
        return _begins_with_gzip(raw)


def _begins_with_gzip(raw: IO[bytes]) -> bool:
    magic = raw.read(len(_GZIP_MAGIC))
    raw.seek(0)
    return magic == _GZIP_MAGIC


def read_lines(part: FileRange) -> Iterator[Line]:
    """The lines that begin in a range. Only LF ends a line; CR before it is cut off; blank lines are passed over.

    Raises:
        InputError: A gzip file that ends too early or is damaged; what came before has been yielded.
    """
    with _open(part.file) as raw:
        if part.start == 0 and _begins_with_gzip(raw):
            yield from _gzip_lines(part, raw)
        else:
            yield from _plain_lines(part, raw)


def _plain_lines(part: FileRange, raw: IO[bytes]) -> Iterator[Line]:
    offset = part.start
    if offset:
        # The line that covers the byte before the range belongs to the range before, however far it reaches.
        # One that reaches beyond this range too is read no further: long lines cross many ranges.
        raw.seek(offset - 1)
        offset += len(raw.readline(-1 if part.end is None else part.end - offset + 1)) - 1
    passed = 0
    while part.end is None or offset < part.end:
        data = raw.readline()
        if not data:
            return
        passed += len(data)
        if line := _content(offset, data):
            yield Line(offset, line, passed)
            passed = 0
        offset += len(data)


def _gzip_lines(part: FileRange, raw: IO[bytes]) -> Iterator[Line]:
    offset = read = 0
    try:
        with gzip.GzipFile(fileobj=raw) as unpacked:
            while part.end is None or offset < part.end:
                data = unpacked.readline()
                if not data:
                    return
                position = raw.tell()
                if line := _content(offset, data):
                    yield Line(offset, line, position - read)
                    read = position
                offset += len(data)
    except (EOFError, OSError, zlib.error) as error:
        message = f"{part.file}: the gzip file is cut off or damaged behind byte {offset}: {error}"
        raise InputError(message, offset) from error


def _content(offset: int, data: bytes) -> bytes:
    """A line without its end, and without a byte order mark at the start of the file; empty if blank."""
    if offset == 0:
        data = data.removeprefix(_BOM)
    return data.rstrip(b"\r\n") if not data.isspace() else b""


def _open(path: str) -> IO[bytes]:
    try:
        opened: IO[bytes] = FileSystems.open(path, compression_type=CompressionTypes.UNCOMPRESSED)
    except OSError as error:  # a folder, no permission, gone since it was matched
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    return opened
