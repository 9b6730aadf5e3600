"""Lines of JSONL files: reading the lines that begin in a range of bytes."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from beam_llm.files import FileRange, InputError, begins_with_gzip, open_file

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its line end, and the offset of its first byte."""

    offset: int
    data: bytes
    weight: int
    """Bytes of the file, as stored, that it stands for, blank lines before it included."""


def read_lines(part: FileRange) -> Iterator[Line]:
    """The lines that begin in a range. Only LF ends a line; CR before it is cut off; blank lines are passed over.

    Raises:
        InputError: A gzip file that ends too early or is damaged; what came before has been yielded.
    """
    with open_file(part.file) as raw:
        if part.start == 0 and begins_with_gzip(raw):
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
