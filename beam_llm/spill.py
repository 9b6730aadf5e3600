"""Large values on disk while their request waits for its answer: `Deferred`, `Spilled`, `spill_large`.

A row with a picture in it (a data URL, bytes of a Parquet cell) would otherwise stay in memory, whole, for as long as
its request is open: thousands of requests of a megabyte each.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Any

from beam_llm.errors import BeamLLMError

LARGE_BYTES = 4096
"""From here on a value goes to disk; what is smaller costs more there than in memory."""

_HEAD_CHARACTERS = 60


class SpillError(BeamLLMError):
    """The folder for temporary files cannot take more; the message names it."""


class Deferred(ABC):
    """A value that is read when it is needed."""

    @abstractmethod
    def load(self) -> Any:
        """The value."""


class SpillFile:
    """One temporary file of a process. What is let go of leaves its room to what comes next.

    It has no name in any folder, so that nothing stays behind however the process ends. Room is given out in powers of
    two; what a value does not fill is never written and takes none of the disk.
    """

    def __init__(self) -> None:
        self._file, name = tempfile.mkstemp(prefix="beam_llm-spill-")
        os.unlink(name)
        weakref.finalize(self, os.close, self._file)
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._end = 0

    @property
    def size(self) -> int:
        """Bytes of the file, free room included."""
        return self._end

    def put(self, data: bytes) -> tuple[int, int]:
        """Writes bytes.

        Returns:
            The place, and the room that is taken there, to be given back with `free`.

        Raises:
            SpillError: No space left.
        """
        room = max(LARGE_BYTES, 1 << (len(data) - 1).bit_length())
        with self._lock:
            if free := self._free[room]:
                place = free.pop()
            else:
                place, self._end = self._end, self._end + room
        try:
            written = os.pwrite(self._file, data, place)
        except OSError as error:
            raise _full(error.strerror) from error
        if written < len(data):
            raise _full("it is full")
        return place, room

    def get(self, place: int, size: int) -> bytes:
        """Reads bytes back."""
        return os.pread(self._file, size, place)

    def free(self, place: int, room: int) -> None:
        """Gives room back. Safe in a finaliser: it takes no lock."""
        self._free[room].append(place)


def _full(reason: str | None) -> SpillError:
    folder = tempfile.gettempdir()
    return SpillError(f"large rows cannot be kept in {folder} while they wait: {reason}; set TMPDIR to a larger disk")


@functools.lru_cache(maxsize=1)
def process_spill() -> SpillFile:
    """The spill file of this process, made when it is first needed."""
    return SpillFile()


class Spilled(Deferred):
    """Bytes or text in the spill file, for as long as this object lives.

    Args:
        value: What to keep.
        spill: The file.
    """

    __slots__ = ("_place", "_room", "_size", "_spill", "head", "length")

    def __init__(self, value: bytes | str, spill: SpillFile) -> None:
        self.head = value[:_HEAD_CHARACTERS] if isinstance(value, str) else None
        """How a text begins; None for bytes."""
        self.length = len(value)
        """Characters of a text, or bytes."""
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        self._spill, self._size, self._room = spill, len(data), 0
        self._place, self._room = spill.put(data)

    def load(self) -> bytes | str:
        """The value as it was."""
        data = self._spill.get(self._place, self._size)
        return data if self.head is None else data.decode("utf-8", "surrogatepass")

    def __del__(self) -> None:
        if self._room:
            self._spill.free(self._place, self._room)

    def __reduce__(self) -> tuple[Any, ...]:
        # On its way to another process it is the value itself again.
        return _as_it_was, (self.load(),)


def _as_it_was(value: Any) -> Any:
    return value


def spill_large(value: Any, spill: SpillFile) -> Any:
    """The value with large bytes and large data URLs in it replaced by `Spilled`; other parts are the same objects."""
    if isinstance(value, str):
        return Spilled(value, spill) if len(value) >= LARGE_BYTES and value.startswith("data:") else value
    if isinstance(value, (bytes, bytearray)):
        return Spilled(bytes(value), spill) if len(value) >= LARGE_BYTES else value
    if isinstance(value, dict):
        return {key: spill_large(item, spill) for key, item in value.items()}
    if isinstance(value, list):
        return [spill_large(item, spill) for item in value]
    return value
