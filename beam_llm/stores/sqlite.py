"""The response store in one SQLite file, shared by all processes of one machine."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from beam_llm.errors import ConfigError
from beam_llm.stores import StoreError

_VERSION = 1
"""Written as `user_version`. Another number is another layout."""

# A table with rowids: at 10 KB a value, WITHOUT ROWID writes 6,000 rows/s instead of 14,000 and reads a third as fast.
_TABLE = "CREATE TABLE responses (key TEXT PRIMARY KEY, value BLOB NOT NULL)"
_BUSY_TIMEOUT_S = 60.0
_ROWS_PER_COMMIT = 500
_KEYS_PER_SELECT = 500
_AWAY = "move the file away and run again (all is asked anew), or save what is left with the sqlite3 command .recover"


class SQLiteStore:
    """Answers in a SQLite file: WAL, group commit in one writer thread, lookups in one reader thread.

    The file must be on a local disk, since WAL needs shared memory, which network file systems do not give. What `put`
    has acknowledged survives the death of every process; a loss of power may take the last moments (synchronous=NORMAL)
    but never damages the file.

    Args:
        path: The file; it and its folder are made if missing.
    """

    def __init__(self, path: str) -> None:
        self._path = os.path.expanduser(path)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="beam_llm-store-reader")
        self._connection: sqlite3.Connection | None = None
        self._writer: _Writer | None = None

    @classmethod
    def from_url(cls, url: str) -> SQLiteStore:
        """The store of `sqlite:///relative.db` or `sqlite:////absolute.db`.

        Raises:
            ConfigError: No file in it.
        """
        path = url.removeprefix("sqlite:///")
        if path == url or not path.strip("/") or path == ":memory:":
            raise ConfigError(f"response_store must be sqlite:///relative.db or sqlite:////absolute.db, got {url!r}")
        return cls(path)

    def __repr__(self) -> str:
        return f"SQLiteStore({self._path!r})"

    async def open(self) -> None:
        """Opens the file, makes what is missing and starts the writer."""
        loop = asyncio.get_running_loop()
        self._connection, to_write = await loop.run_in_executor(self._reader, _open_twice, self._path)
        self._writer = _Writer(self._path, to_write, loop)
        self._writer.start()

    async def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of the known keys."""
        if self._connection is None:
            raise StoreError(f"response store {self._path} is not open")
        return await asyncio.get_running_loop().run_in_executor(
            self._reader, _select, self._path, self._connection, list(keys)
        )

    async def put(self, key: str, value: bytes) -> None:
        """Returns once the row is committed."""
        if self._writer is None:
            raise StoreError(f"response store {self._path} is not open")
        await self._writer.put(key, value)

    async def close(self) -> None:
        """Commits what is queued and closes the file."""
        writer, self._writer = self._writer, None
        connection, self._connection = self._connection, None
        loop = asyncio.get_running_loop()
        if writer is not None:
            await loop.run_in_executor(None, writer.finish)
        await loop.run_in_executor(None, self._reader.shutdown)
        if connection is not None:
            connection.close()


@dataclass(frozen=True, slots=True)
class _Put:
    key: str
    value: bytes
    committed: asyncio.Future[None]


class _Writer(threading.Thread):
    """The one thread of a process that writes. What is queued while a commit runs goes into the next one, together."""

    def __init__(self, path: str, connection: sqlite3.Connection, loop: asyncio.AbstractEventLoop) -> None:
        # A daemon: what it might still hold when the process ends without close() has not been acknowledged.
        super().__init__(name="beam_llm-store-writer", daemon=True)
        self._path = path
        self._connection = connection
        self._loop = loop
        self._queue: queue.SimpleQueue[_Put | None] = queue.SimpleQueue()

    async def put(self, key: str, value: bytes) -> None:
        """Returns once the row is committed."""
        committed = self._loop.create_future()
        self._queue.put(_Put(key, value, committed))
        await committed

    def finish(self) -> None:
        """Blocks until all that is queued is committed and the connection closed."""
        self._queue.put(None)
        self.join()

    def run(self) -> None:
        """Commits until told to finish."""
        with closing(self._connection):
            while (first := self._queue.get()) is not None:
                batch, failure = [first], None
                try:
                    self._commit(batch)
                except Exception as error:  # whatever it is, those who wait must hear of it
                    failure = _store_error(self._path, error)
                    self._take_queued(batch)  # it would fail as well, each batch after a wait of its own
                try:
                    self._loop.call_soon_threadsafe(_settle, batch, failure)
                except RuntimeError:  # the loop has been closed: nobody waits any more
                    return

    def _commit(self, batch: list[_Put]) -> None:
        """Writes `batch`, and whatever else has been queued by the time the write lock is ours, in one transaction."""
        with _transaction(self._connection, "IMMEDIATE"):
            self._take_queued(batch)
            rows = [(put.key, put.value) for put in batch]
            self._connection.executemany("INSERT OR IGNORE INTO responses VALUES (?, ?)", rows)

    def _take_queued(self, batch: list[_Put]) -> None:
        while len(batch) < _ROWS_PER_COMMIT and not self._queue.empty():
            if (item := self._queue.get()) is None:
                self._queue.put(None)
                return
            batch.append(item)


def _settle(batch: list[_Put], failure: StoreError | None) -> None:
    for put in batch:
        if put.committed.done():
            continue
        if failure is None:
            put.committed.set_result(None)
        else:
            put.committed.set_exception(failure)


def _select(path: str, connection: sqlite3.Connection, keys: list[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        for start in range(0, len(keys), _KEYS_PER_SELECT):
            some = keys[start : start + _KEYS_PER_SELECT]
            marks = ",".join("?" * len(some))
            found.update(connection.execute(f"SELECT key, value FROM responses WHERE key IN ({marks})", some))  # noqa: S608
    except sqlite3.Error as error:
        raise _store_error(path, error) from error
    return found


def _open_twice(path: str) -> tuple[sqlite3.Connection, sqlite3.Connection]:
    """Two connections, to read and to write, to a file that is known to be ours and writable."""
    with ExitStack() as on_failure:
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            to_read = on_failure.enter_context(closing(_connection(path)))
            to_write = on_failure.enter_context(closing(_connection(path)))
            _prepare_patiently(to_write)
        except (sqlite3.Error, OSError, _WrongFileError) as error:
            raise _store_error(path, error) from error
        on_failure.pop_all()
        return to_read, to_write


class _WrongFileError(Exception):
    pass


def _connection(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous=NORMAL")
    return connection


def _prepare_patiently(connection: sqlite3.Connection) -> None:
    """As `_prepare`, while others do the same: going over to WAL is refused at once, without the busy timeout."""
    give_up = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            return _prepare(connection)
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() > give_up:
                raise
        time.sleep(random.uniform(0.005, 0.05))


def _prepare(connection: sqlite3.Connection) -> None:
    """WAL and the table. Takes the write lock in any case, which proves that the file can be written."""
    with _transaction(connection, "DEFERRED"):  # one snapshot: others may be making the table at this moment
        _is_empty(connection)  # if it is another program's, it stays as it is
    if (mode := connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]) != "wal":
        raise _WrongFileError(f"this place allows no WAL (journal mode {mode}); put the file on a local disk")
    with _transaction(connection, "IMMEDIATE"):
        if _is_empty(connection):
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA user_version={_VERSION}")


def _is_empty(connection: sqlite3.Connection) -> bool:
    """True for a new file, False for a store of ours; anything else raises."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables and version == 0:
        return True
    if "responses" not in tables:
        raise _WrongFileError("is another program's database; name another file")
    if version != _VERSION:
        raise _WrongFileError(f"has layout {version}, this beam_llm writes {_VERSION}; name another file")
    return False


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: str) -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _is_busy(error: Exception) -> bool:
    # Error codes are on the exception from Python 3.11 on only.
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def _store_error(path: str, error: Exception) -> StoreError:
    return StoreError(f"response store {path}: {error}{_way_out(error)}")


def _way_out(error: Exception) -> str:
    if _is_busy(error):
        return f"; another process has held it for {_BUSY_TIMEOUT_S:.0f} s: end that one, or name another file"
    if isinstance(error, sqlite3.DatabaseError) and ("malformed" in str(error) or "not a database" in str(error)):
        return f"; {_AWAY}"
    if isinstance(error, (sqlite3.OperationalError, OSError)):
        return "; the file and its folder must be writable and the disk not full"
    return ""
