"""The response store in a Google Cloud Storage bucket, an object an answer, where there is no Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import requests.adapters
from google.api_core.exceptions import NotFound, PreconditionFailed
from google.auth.exceptions import GoogleAuthError
from google.cloud import storage  # type: ignore[import-untyped]
from google.cloud.storage.retry import DEFAULT_RETRY  # type: ignore[import-untyped]

from beam_llm.errors import ConfigError
from beam_llm.stores import StoreError

T = TypeVar("T")

_VERSION = b"1"
_THREADS = 32
_TIMEOUT_S = (3.0, 5.0)
"""To connect, and between two reads."""

# The library retries 429, 5xx and cut connections; a create with a generation match may be sent twice safely.
_RETRY = DEFAULT_RETRY.with_delay(initial=0.2, maximum=2.0, multiplier=2.0).with_timeout(5.0)


class GCSStore:
    """Answers as objects `<prefix><first two digits>/<key>`.

    Objects are made only where there is none (`if_generation_match=0`), so the first answer stays. Google bills every
    lookup and every create as one operation; a lookup of a batch is as many requests as it has keys, 32 at a time.

    Args:
        url: `gs://bucket/prefix/`; the prefix may be empty.

    Raises:
        ConfigError: No bucket in it.
    """

    def __init__(self, url: str) -> None:
        bucket, _, prefix = url.removeprefix("gs://").partition("/")
        if not bucket:
            raise ConfigError(f"response_store must be gs://bucket/prefix/, got {url!r}")
        self._url = url
        self._bucket_name = bucket
        self._prefix = prefix if not prefix or prefix.endswith("/") else prefix + "/"
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="beam_llm-store")
        self._client: Any = None
        self._bucket: Any = None
        self._is_open = False
        self._failures = 0

    def __repr__(self) -> str:
        return f"GCSStore({self._url!r})"

    async def open(self) -> None:
        """Creates the object `version` if there is none, and checks it: that the bucket is there and takes objects."""
        try:
            version = await self._run(self._connect)
        except StoreError:
            await self.close()
            raise
        if version != _VERSION:
            await self.close()
            raise StoreError(
                f"response store {self._url} has layout {version!r}, this beam_llm writes {_VERSION!r}; "
                "name another prefix"
            )
        self._is_open = True

    async def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of the known keys."""
        self._check_open()
        values = await asyncio.gather(*(self._run(self._download, self._object_name(key)) for key in keys))
        return {key: value for key, value in zip(keys, values, strict=True) if value is not None}

    async def put(self, key: str, value: bytes) -> None:
        """Returns once the object is there."""
        self._check_open()
        await self._run(self._create, self._object_name(key), value)

    async def close(self) -> None:
        """Waits for what is on its way."""
        self._is_open = False
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
        if self._client is not None:
            self._client.close()
            self._client = self._bucket = None

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreError(f"response store {self._url} is not open")

    def _object_name(self, key: str) -> str:
        return f"{self._prefix}{key[:2]}/{key}"

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """What the function returns in one of the threads.

        Once one call has failed, its retries included, those queued behind it fail with it: they would wait as long in
        their turn, 32 at a time.
        """
        failures_before = self._failures

        def call() -> T:
            if self._failures != failures_before:
                raise StoreError(f"response store {self._url}: given up, since a request before this one has failed")
            try:
                return function(*arguments)
            except Exception as error:  # of five families: api_core, auth, resumable media, requests, urllib3
                self._failures += 1
                raise StoreError(f"response store {self._url}: {_reason(error)}") from error

        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _connect(self) -> bytes | None:
        # The project is only needed to create buckets; None keeps the client from searching for one.
        self._client = storage.Client(project=None)
        adapter = requests.adapters.HTTPAdapter(pool_connections=_THREADS, pool_maxsize=_THREADS)
        # The session's own pool holds 10 connections and drops the rest after each request.
        self._client._http.mount("https://", adapter)
        self._client._http.mount("http://", adapter)
        self._bucket = self._client.bucket(self._bucket_name)
        self._create(f"{self._prefix}version", _VERSION)
        return self._download(f"{self._prefix}version")

    def _create(self, name: str, value: bytes) -> None:
        try:
            self._bucket.blob(name).upload_from_string(
                value,
                content_type="application/octet-stream",
                if_generation_match=0,
                timeout=_TIMEOUT_S,
                retry=_RETRY,
            )
        except PreconditionFailed:
            return  # there already, from another worker or from a try whose answer was lost

    def _download(self, name: str) -> bytes | None:
        try:
            value: bytes = self._bucket.blob(name).download_as_bytes(timeout=_TIMEOUT_S, retry=_RETRY)
        except NotFound:
            return None
        return value


def _reason(error: Exception) -> str:
    if isinstance(error, GoogleAuthError):
        return f"no credentials ({error}); run gcloud auth application-default login"
    if isinstance(error, NotFound):
        return f"no such bucket ({error}); create it first"
    return f"{error}; the bucket must be reachable and writable"
