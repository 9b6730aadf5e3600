"""The response store in a Redis or Valkey server, for workers on several machines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from beam_llm.errors import ConfigError
from beam_llm.stores import StoreError, redacted

T = TypeVar("T")

_PREFIX = "beam_llm:"
_VERSION_KEY = "beam_llm:store-version"
_VERSION = b"1"
_LIMIT_S = 9.0
"""Longest wait for one command, its retries included: a store that is gone must show soon."""

_SOCKET_TIMEOUT_S = 4.0
_CONNECTIONS = 16
_ROWS_PER_PIPELINE = 200
_KEYS_PER_MGET = 200


class RedisStore:
    """Answers in Redis, under keys that begin with `beam_llm:`.

    What `put` has acknowledged is in the server's memory. How much of it outlives the server is for the server's own
    settings (`appendonly`, `save`); one that evicts keys forgets answers, which are then bought again.

    Args:
        url: `redis://[user:password@]host:port/db`, `rediss://` for TLS; `?ttl_s=` lets answers expire after so many
            seconds (without it never), `ssl_*` options are those of redis-py.

    Raises:
        ConfigError: A URL that cannot work.
    """

    def __init__(self, url: str) -> None:
        self._name = redacted(url)
        address, self._ttl_s = _split_ttl(url)
        try:
            self._pool = BlockingConnectionPool.from_url(
                address,
                max_connections=_CONNECTIONS,
                timeout=_LIMIT_S,
                socket_timeout=_SOCKET_TIMEOUT_S,
                socket_connect_timeout=_SOCKET_TIMEOUT_S,
                # Six waits, 4.4 s together: lives through the restart of a server.
                retry=Retry(ExponentialBackoff(cap=1.0, base=0.1), retries=6),
            )
        except ValueError:
            # Without its text, which may quote a part of the password.
            raise ConfigError(
                f"response_store {self._name}: not a Redis URL; write redis://:password@host:port/0, the password "
                "percent-encoded"
            ) from None
        self._client = Redis(connection_pool=self._pool)
        self._pending: list[tuple[str, bytes, asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self._is_open = False

    def __repr__(self) -> str:
        return f"RedisStore({self._name!r})"

    async def open(self) -> None:
        """Writes the version if there is none, and checks it: that the server answers and takes writes."""
        try:
            await self._bounded(self._client.set(_VERSION_KEY, _VERSION, nx=True))
            version = await self._bounded(self._client.get(_VERSION_KEY))
        except StoreError:
            await self.close()
            raise
        if version != _VERSION:
            await self.close()
            raise StoreError(
                f"response store {self._name} has layout {version!r}, this beam_llm writes {_VERSION!r}; "
                "use another database number (the last part of the URL)"
            )
        self._is_open = True

    async def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of the known keys."""
        found: dict[str, bytes] = {}
        for start in range(0, len(keys), _KEYS_PER_MGET):
            some = keys[start : start + _KEYS_PER_MGET]
            values = await self._bounded(self._client.mget([_PREFIX + key for key in some]))
            found.update((key, value) for key, value in zip(some, values, strict=True) if isinstance(value, bytes))
        return found

    async def put(self, key: str, value: bytes) -> None:
        """Returns once the server has the value; puts that wait together go in one pipeline."""
        if not self._is_open:
            raise StoreError(f"response store {self._name} is not open")
        loop = asyncio.get_running_loop()
        stored: asyncio.Future[None] = loop.create_future()
        self._pending.append((key, value, stored))
        if self._flusher is None:
            self._flusher = loop.create_task(self._flush())
        await stored

    async def close(self) -> None:
        """Sends what is pending and closes the connections."""
        self._is_open = False
        if self._flusher is not None:
            await self._flusher
        await self._client.aclose()
        await self._pool.disconnect()

    async def _flush(self) -> None:
        try:
            while self._pending:
                batch, self._pending = self._pending[:_ROWS_PER_PIPELINE], self._pending[_ROWS_PER_PIPELINE:]
                failure: StoreError | None = None
                try:
                    await self._send([(key, value) for key, value, _ in batch])
                except StoreError as error:
                    failure = error
                    # The rest would fail as well, each pipeline after a wait of its own.
                    batch, self._pending = batch + self._pending, []
                for _, _, stored in batch:
                    if stored.done():
                        continue
                    stored.set_exception(failure) if failure else stored.set_result(None)
        finally:
            self._flusher = None

    async def _send(self, rows: list[tuple[str, bytes]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, value in rows:
            pipeline.set(_PREFIX + key, value, nx=True, ex=self._ttl_s)
        await self._bounded(pipeline.execute())

    async def _bounded(self, command: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(command, _LIMIT_S)
        except Exception as error:  # redis-py raises of many families, and no put may be left waiting
            reason = str(error) or f"no answer within {_LIMIT_S:.0f} s"
            raise StoreError(
                f"response store {self._name}: {reason}; is the server up, and does it take writes?"
            ) from error


def _split_ttl(url: str) -> tuple[str, int | None]:
    """The URL without `ttl_s`, and its value."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    ttl_s = options.pop("ttl_s", None)
    if unknown := [name for name in options if name != "db" and not name.startswith("ssl_")]:
        raise ConfigError(f"response_store: unknown option {unknown[0]!r} in the URL; known are ttl_s, db and ssl_*")
    if ttl_s is not None and (not ttl_s.isdecimal() or int(ttl_s) < 1):
        raise ConfigError(f"response_store: ttl_s must be a whole number of seconds >= 1, got {ttl_s!r}")
    return urlunsplit(parts._replace(query=urlencode(options))), int(ttl_s) if ttl_s else None
