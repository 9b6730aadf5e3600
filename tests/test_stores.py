"""The response stores against the real things: SQLite files, redis-server, fake-gcs-server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import multiprocessing
import os
import signal
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import TypeVar

import pytest
import uvloop
from google.cloud import storage  # type: ignore[import-untyped]
from redis import Redis

from beam_llm.errors import ConfigError
from beam_llm.stores import ResponseStore, StoreError, open_store, redacted
from tests.servers import GCSServer, RedisServer, free_port, gcs_server, redis_server

T = TypeVar("T")

FAIL_WITHIN_S = 10.0
UNUSED = itertools.count()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server("--databases", "100") as server:
        yield server


@pytest.fixture(scope="module")
def gcs() -> Iterator[GCSServer]:
    with gcs_server("answers") as server:
        yield server


@pytest.fixture
def redis_url(redis: RedisServer) -> str:
    """An empty database of a Redis server."""
    return f"{redis.url.removesuffix('0')}{next(UNUSED)}"


@pytest.fixture(params=["sqlite", "redis", "gcs"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/not/yet/there/answers.db"
    if request.param == "redis":
        return str(request.getfixturevalue("redis_url"))
    request.getfixturevalue("gcs")
    return f"gs://answers/run-{next(UNUSED)}/"


def key_of(number: object) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()[:40]


def value_of(key: str, size: int = 2000) -> bytes:
    return (key.encode() * (size // len(key) + 1))[:size]


def with_store(url: str, work: Callable[[ResponseStore], Awaitable[T]]) -> T:
    """What `work` makes of the opened store, on the kind of loop that the driver runs."""

    async def run() -> T:
        store = open_store(url)
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return uvloop.run(run())


async def put_all(store: ResponseStore, keys: list[str]) -> None:
    await asyncio.gather(*(store.put(key, value_of(key)) for key in keys))


def test_values_come_back_to_another_process_as_they_were(url: str) -> None:
    values = {key_of(i): value for i, value in enumerate([b"{}", b"", bytes(range(256)), os.urandom(1_000_000)])}

    async def write(store: ResponseStore) -> None:
        await asyncio.gather(*(store.put(key, value) for key, value in values.items()))

    assert with_store(url, lambda store: store.get_many(list(values))) == {}
    with_store(url, write)
    assert with_store(url, lambda store: store.get_many([])) == {}
    keys = [*values, key_of("unknown"), next(iter(values))]
    assert with_store(url, lambda store: store.get_many(keys)) == values


def test_first_write_stays(url: str) -> None:
    async def write_twice(store: ResponseStore) -> dict[str, bytes]:
        await store.put(key_of(1), b"first")
        await asyncio.gather(*(store.put(key_of(1), b"later") for _ in range(3)))
        return await store.get_many([key_of(1)])

    assert with_store(url, write_twice) == {key_of(1): b"first"}


def test_many_puts_at_once_and_a_batch_larger_than_any_chunk(url: str) -> None:
    keys = [key_of(i) for i in range(100 if url.startswith("gs:") else 3000)]

    async def write_and_read(store: ResponseStore) -> dict[str, bytes]:
        await put_all(store, keys[::2])
        return await store.get_many(keys)

    assert with_store(url, write_and_read) == {key: value_of(key) for key in keys[::2]}


def test_close_commits_what_is_pending(url: str) -> None:
    keys = [key_of(i) for i in range(50)]

    async def close_at_once(store: ResponseStore) -> None:
        puts = [asyncio.ensure_future(store.put(key, value_of(key))) for key in keys]
        await asyncio.sleep(0)
        await store.close()
        await asyncio.gather(*puts)

    with_store(url, close_at_once)
    assert set(with_store(url, lambda store: store.get_many(keys))) == set(keys)


def test_put_that_nobody_waits_for_any_more_harms_no_other(url: str) -> None:
    async def cancel_one(store: ResponseStore) -> dict[str, bytes]:
        puts = [asyncio.ensure_future(store.put(key_of(i), b"x")) for i in range(20)]
        await asyncio.sleep(0)
        puts[0].cancel()
        await asyncio.gather(*puts[1:])
        assert puts[0].cancelled()
        return await store.get_many([key_of(i) for i in range(1, 20)])

    assert len(with_store(url, cancel_one)) == 19


def test_closed_store_says_so_and_can_be_closed_again(url: str) -> None:
    async def use_after_close(store: ResponseStore) -> None:
        await store.close()
        with pytest.raises(StoreError, match="not open"):
            await store.put(key_of(1), b"x")

    with_store(url, use_after_close)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "answers.db",
        "sqlite://answers.db",
        "sqlite:///",
        "sqlite:///:memory:",
        "postgres://user:hunter2@host/db",
        "gs://",
        "gs:///prefix",
        "redis://:hunter2@host:port/0",
        "redis://:hunt/hunter2@host:6379/0",
        "redis://:hunter2@host:6379/0?ttl_s=0",
        "redis://:hunter2@host:6379/0?ttl_s=soon",
        "redis://:hunter2@host:6379/0?ttl=60",
    ],
)
def test_url_that_cannot_work_is_named_without_its_password(wrong: str) -> None:
    with pytest.raises(ConfigError, match="response_store") as raised:
        open_store(wrong)
    assert "hunt" not in str(raised.value)


def test_password_is_not_shown() -> None:
    assert redacted("rediss://me:pa/ss@word@host:1/0") == "rediss://***@host:1/0"
    assert "hunter2" not in repr(open_store("redis://:hunter2@host:6379/0"))


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "beam_llm.stores.redis", raising=False)
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(StoreError, match=r"pip install 'beam_llm\[redis\]'"):
        open_store("redis://host:6379/0")


def write_rows(paths: list[str], start: Barrier, numbers: range) -> None:
    for path in paths:
        start.wait()
        with_store(f"sqlite:///{path}", lambda store: put_all(store, [key_of(i) for i in numbers]))


def write_until_killed(path: str, acknowledged: Path) -> None:
    async def write(store: ResponseStore) -> None:
        with acknowledged.open("ab", buffering=0) as log:

            async def worker(number: int) -> None:
                for i in itertools.count():
                    key = key_of((acknowledged, number, i))
                    await store.put(key, value_of(key))
                    log.write(key.encode() + b"\n")

            await asyncio.gather(*(worker(number) for number in range(32)))

    with_store(f"sqlite:///{path}", write)


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Makes processes that have this module loaded, and none of the threads of this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_stores"])
    return context


def test_sixteen_processes_open_an_empty_store_at_once(tmp_path: Path, processes: ForkServerContext) -> None:
    """C55."""
    # Ten stores, since a race in opening shows once in some hundred times.
    paths, start = [f"{tmp_path}/{i}.db" for i in range(10)], processes.Barrier(16, timeout=30)
    shares = [range(first, first + 20) for first in range(0, 320, 20)]
    writers = [processes.Process(target=write_rows, args=(paths, start, share)) for share in shares]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 16
    expected = {key_of(i): value_of(key_of(i)) for i in range(320)}
    for path in paths:
        assert with_store(f"sqlite:///{path}", lambda store: store.get_many(list(expected))) == expected


def test_kill_of_all_writers_loses_no_acknowledged_row(tmp_path: Path, processes: ForkServerContext) -> None:
    """C59."""
    path = str(tmp_path / "answers.db")
    logs = [tmp_path / f"acknowledged-{i}" for i in range(6)]
    for round_logs in (logs[:3], logs[3:]):
        writers = [processes.Process(target=write_until_killed, args=(path, log)) for log in round_logs]
        for writer in writers:
            writer.start()
        wait_for_size(round_logs, 40_000)
        for writer in writers:
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
    keys = [line.decode() for log in logs for line in log.read_bytes().split(b"\n")[:-1]]
    assert len(keys) > 5000
    assert with_store(f"sqlite:///{path}", lambda store: store.get_many(keys)) == {k: value_of(k) for k in keys}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def wait_for_size(files: list[Path], size: int, limit_s: float = 20.0) -> None:
    give_up = time.monotonic() + limit_s
    while not all(file.exists() and file.stat().st_size > size for file in files):
        assert time.monotonic() < give_up
        time.sleep(0.01)


def make_store(path: Path, rows: int = 100) -> None:
    with_store(f"sqlite:///{path}", lambda store: put_all(store, [key_of(i) for i in range(rows)]))


def alter(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def make_garbage(path: Path) -> None:
    path.write_bytes(b"{'not': 'a database'}" * 1000)


def make_truncated(path: Path) -> None:
    make_store(path)
    os.truncate(path, path.stat().st_size // 2)


def make_newer(path: Path) -> None:
    make_store(path)
    alter(path, "PRAGMA user_version=2")


def make_foreign(path: Path) -> None:
    alter(path, "CREATE TABLE users (name TEXT)", "INSERT INTO users VALUES ('me')")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_garbage, r"not a database; move the file away"),
        (make_truncated, r"malformed; move the file away"),
        (make_newer, r"layout 2.*name another file"),
        (make_foreign, r"another program's database"),
        (Path.mkdir, r"must be writable"),
    ],
)
def test_file_that_is_no_store_is_named_and_left_alone(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    path = tmp_path / "answers.db"
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StoreError, match=rf"{path}.*{reason}"):
        make_store(path)
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/answers\.db.*must be writable"):
        make_store(tmp_path / "file" / "answers.db")


def test_damage_in_the_middle_is_an_error_of_the_lookup_or_the_opening(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    make_store(path, rows=1000)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    with pytest.raises(StoreError, match="malformed; move the file away"):
        with_store(f"sqlite:///{path}", lambda store: store.get_many([key_of(i) for i in range(1000)]))


def test_put_waits_for_another_writer(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    make_store(path)

    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:

        async def write(store: ResponseStore) -> dict[str, bytes]:
            other.execute("BEGIN IMMEDIATE")
            put = asyncio.ensure_future(store.put("new", b"x"))
            assert not (await asyncio.wait([put], timeout=0.1))[0]
            other.execute("COMMIT")
            await put
            return await store.get_many(["new"])

        assert with_store(f"sqlite:///{path}", write) == {"new": b"x"}


def test_lock_that_is_never_released_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beam_llm.stores.sqlite._BUSY_TIMEOUT_S", 0.1)
    path = tmp_path / "answers.db"
    make_store(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process has held it"):
            make_store(path)


def test_store_that_breaks_fails_all_waiting_puts(tmp_path: Path) -> None:
    async def write(store: ResponseStore) -> list[object]:
        alter(tmp_path / "answers.db", "DROP TABLE responses")
        return await asyncio.gather(*(store.put(key_of(i), b"x") for i in range(1200)), return_exceptions=True)

    assert {type(result) for result in with_store(f"sqlite:///{tmp_path}/answers.db", write)} == {StoreError}


@contextlib.contextmanager
def fails_soon(reason: str) -> Iterator[None]:
    """The block must raise a StoreError of that text, within the limit, without the password."""
    began = time.monotonic()
    with pytest.raises(StoreError, match=reason) as raised:
        yield
    assert time.monotonic() - began < FAIL_WITHIN_S
    assert "hunter2" not in str(raised.value)


async def nothing(_: ResponseStore) -> None:
    """Opening is enough."""


def test_redis_that_is_down_is_an_error_soon() -> None:
    with fails_soon(r"redis://\*\*\*@127\.0\.0\.1.*refused"):
        with_store(f"redis://:hunter2@127.0.0.1:{free_port()}/0", nothing)


def test_redis_that_never_answers_is_an_error_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beam_llm.stores.redis._LIMIT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, fails_soon("no answer within"):
        with_store(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", nothing)


def test_redis_password_that_is_wrong_is_an_error_without_it() -> None:
    with redis_server("--requirepass", "right") as server:
        address = server.url.removeprefix("redis://")
        with_store(f"redis://:right@{address}", nothing)
        with fails_soon("invalid username-password pair"):
            with_store(f"redis://:hunter2@{address}", nothing)


@pytest.mark.parametrize(
    ("options", "reason"),
    [(["--replicaof", "127.0.0.1", "1"], "read only replica"), (["--maxmemory", "100kb"], "maxmemory")],
)
def test_redis_that_refuses_writes_is_an_error(options: list[str], reason: str) -> None:
    with redis_server(*options) as server, fails_soon(f"(?i){reason}"):
        with_store(server.url, nothing)


def test_redis_that_dies_during_the_run_fails_the_puts_soon() -> None:
    with redis_server() as server:

        async def break_it(store: ResponseStore) -> None:
            await put_all(store, [key_of(i) for i in range(100)])
            server.process.kill()
            server.process.wait()
            await put_all(store, [key_of(i) for i in range(100, 1000)])

        with fails_soon("is the server up"):
            with_store(server.url, break_it)


def test_redis_that_restarts_is_waited_for() -> None:
    with contextlib.ExitStack() as servers:
        server = servers.enter_context(redis_server())
        restart = threading.Timer(0.3, lambda: servers.enter_context(redis_server(port=server.port)))

        async def write_meanwhile(store: ResponseStore) -> dict[str, bytes]:
            await store.put(key_of(1), b"before")
            server.process.kill()
            server.process.wait()
            restart.start()
            await store.put(key_of(2), b"after")
            return await store.get_many([key_of(1), key_of(2)])

        assert with_store(server.url, write_meanwhile) == {key_of(2): b"after"}
        restart.join()


def test_redis_answers_expire_only_if_told_to(redis_url: str) -> None:
    with_store(redis_url, lambda store: store.put("keeps", b"x"))
    with_store(f"{redis_url}?ttl_s=100", lambda store: store.put("expires", b"x"))
    with Redis.from_url(redis_url) as client:
        assert client.ttl("beam_llm:keeps") == -1
        assert 90 < int(str(client.ttl("beam_llm:expires"))) <= 100


def test_redis_of_another_version_is_an_error(redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        client.set("beam_llm:store-version", "2")
    with fails_soon("layout b'2'.*another database number"):
        with_store(redis_url, nothing)


def test_gcs_bucket_that_is_not_there_is_an_error(gcs: GCSServer) -> None:
    with fails_soon(r"gs://nowhere/run/.*no such bucket"):
        with_store("gs://nowhere/run/", nothing)


def test_gcs_of_another_version_is_an_error(gcs: GCSServer) -> None:
    storage.Client().bucket("answers").blob("newer/version").upload_from_string(b"2")
    with fails_soon("layout b'2'.*another prefix"):
        with_store("gs://answers/newer", nothing)


def test_gcs_that_is_down_is_an_error_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{free_port()}")
    with fails_soon("must be reachable"):
        with_store("gs://answers/run/", nothing)


def test_gcs_without_credentials_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with fails_soon("gcloud auth application-default login"):
        with_store("gs://answers/run/", nothing)


def test_gcs_that_dies_during_the_run_fails_the_puts_soon_and_closes() -> None:
    with gcs_server("answers") as server:

        async def break_it(store: ResponseStore) -> None:
            await put_all(store, [key_of(i) for i in range(10)])
            server.process.kill()
            server.process.wait()
            await put_all(store, [key_of(i) for i in range(10, 300)])

        with fails_soon("must be reachable"):
            with_store("gs://answers/run/", break_it)
