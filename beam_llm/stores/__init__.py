"""Where finished answers are kept, so that a replayed bundle or a rerun pays for none of them again."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Protocol

from beam_llm.errors import BeamLLMError, ConfigError

__all__ = ["ResponseStore", "StoreError", "check_store_url", "open_store", "redacted"]

_EXPECTED = "response_store must be sqlite:///file.db, redis://host:port/0 or gs://bucket/prefix/"


class StoreError(BeamLLMError):
    """The response store cannot be used; the message names it, without its password, and the way out."""


class ResponseStore(Protocol):
    """Answers by key. One object per process, used from one event loop; many processes share what is behind it.

    The first write of a key stays: a later one for the same key is dropped without an error, since two answers to the
    same request are equally good. Values are taken as they are.
    """

    async def open(self) -> None:
        """Connects, and makes what is missing.

        Raises:
            StoreError: Not there, damaged, not writable, or written by another version.
        """

    async def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of those keys that are known. Made for whole batches: one call, not one per key.

        Raises:
            StoreError: The store has broken.
        """

    async def put(self, key: str, value: bytes) -> None:
        """Returns once the value is committed. Call it many times at once: what waits together is written together.

        Raises:
            StoreError: The store has broken, or is closed. The value may be there all the same.
        """

    async def close(self) -> None:
        """Commits what is pending and lets go of files and connections. May be called twice."""


def open_store(url: str) -> ResponseStore:
    """The store that a URL names. It is not connected until `open()`.

    Args:
        url: `sqlite:///relative.db`, `sqlite:////absolute.db`, `redis://…`, `rediss://…` or `gs://bucket/prefix/`.

    Raises:
        ConfigError: A URL that none of them can have.
        StoreError: The package that it needs is not installed.
    """
    scheme, separator, _ = url.partition("://")
    try:
        if separator and scheme == "sqlite":
            from beam_llm.stores.sqlite import SQLiteStore

            return SQLiteStore.from_url(url)
        if separator and scheme in ("redis", "rediss"):
            from beam_llm.stores.redis import RedisStore

            return RedisStore(url)
        if separator and scheme == "gs":
            from beam_llm.stores.gcs import GCSStore

            return GCSStore(url)
    except ModuleNotFoundError as error:
        package = {"gs": "google-cloud-storage"}.get(scheme, "'beam_llm[redis]'")
        raise StoreError(f"response_store {redacted(url)} needs a package: pip install {package} ({error})") from error
    raise ConfigError(f"{_EXPECTED}, got {redacted(url)!r}")


async def try_store(url: str) -> None:
    """Opens and closes the store, so that one that cannot be used is known before any request is sent.

    Args:
        url: As in ChatConfig; `$NAME` in it is replaced from the environment.

    Raises:
        StoreError: Down, damaged, not writable, or written by another version.
    """
    store = open_store(os.path.expandvars(url))
    await store.open()
    await store.close()


def check_store_url(url: str) -> None:
    """Refuses a URL of no known kind, or one with a password in it: options and graphs are stored and shown.

    Raises:
        ConfigError: Says how to give the password instead.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("sqlite", "redis", "rediss", "gs"):
        raise ConfigError(f"{_EXPECTED}, got {redacted(url)!r}")
    user = rest.rpartition("@")[0]
    if scheme.startswith("redis") and ":" in user and not user.partition(":")[2].startswith("$"):
        raise ConfigError(
            f"response_store {redacted(url)} must not carry a password: put it into an environment variable of the "
            "workers and write redis://:$NAME@host"
        )


def redacted(url: str) -> str:
    """The URL without user and password, however oddly the password is written."""
    return re.sub(r"//.*@", "//***@", url, flags=re.DOTALL)
