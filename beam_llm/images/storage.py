"""Read a picture from a storage system that Beam knows (`gs://`, `s3://`, …), with one client for the process."""

from __future__ import annotations

import functools
import threading
from typing import Any

from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems

from beam_llm.errors import ErrorKind, RequestError
from beam_llm.images.fetch import TransientReadError

_FINAL_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError, ImportError)
_RETRYABLE_STATUS = (408, 425, 429)
_CONNECTIONS = 64
"""Kept open to Cloud Storage; the library's own pool of 10 throws the rest away and connects anew."""
_client_lock = threading.Lock()


def _refused(reason: str) -> RequestError:
    return RequestError(reason, ErrorKind.BAD_IMAGE)


def check_storage_url(url: str, root: str | None) -> None:
    """Make sure that a URL is one that may be read and that a file system of Beam reads.

    Args:
        url: With its scheme, such as `gs://bucket/cat.jpg`.
        root: The only prefix that may be read; None: any.

    Raises:
        RequestError: It is outside the root, or nothing that is installed reads its scheme.
    """
    if root is not None:
        inside = "://" in root and url.startswith(root.rstrip("/") + "/")
        if not inside or ".." in url.split("/"):
            raise _refused(f"is outside the root {root}")
    try:
        FileSystems.get_filesystem(url)
    except ValueError as error:
        scheme = url.partition("://")[0]
        reason = f"has the scheme {scheme!r}, which no installed file system reads"
        raise _refused(reason + ("; `pip install apache-beam[gcp]`" if scheme == "gs" else "")) from error


def read_storage_once(url: str, limit: int) -> bytes:
    """Read an object through Beam's file systems, in one try.

    Args:
        url: The object.
        limit: Most bytes to read.

    Raises:
        TransientReadError: Whatever may be gone a moment later: time-outs, 5xx, broken connections.
        RequestError: It is not there, may not be read, or is too large.
    """
    try:
        with _open(url) as file:
            body = bytearray()
            while len(body) <= limit and (chunk := file.read(limit + 1 - len(body))):  # a read may fall short
                body += chunk
    except Exception as error:  # each storage library has its own tree: told apart by status
        status = _status_of(error)
        reason = f"cannot be read ({type(error).__name__}: {error})"[:300]
        if isinstance(error, FileNotFoundError) or status == 404:
            raise _refused("does not exist") from error
        is_final = 400 <= status < 500 and status not in _RETRYABLE_STATUS
        if is_final or isinstance(error, _FINAL_ERRORS):
            raise _refused(reason) from error
        raise TransientReadError(reason) from error
    if len(body) > limit:
        raise _refused(f"is larger than max_download_bytes ({limit})")
    return bytes(body)


def _status_of(error: Exception) -> int:
    """The HTTP status that a storage library's exception carries; 0 if none."""
    for name in ("code", "status_code", "status"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return int(value)
    return 0


def _open(url: str) -> Any:
    if not url.startswith("gs://"):
        return FileSystems.open(url, compression_type=CompressionTypes.UNCOMPRESSED)
    with _client_lock:
        storage = _cloud_storage()
    return storage.open(url)


@functools.lru_cache(maxsize=1)
def _cloud_storage() -> Any:
    """Beam's reader for Cloud Storage. `FileSystems.open` makes a new one, credentials and all, for each file."""
    from apache_beam.io.gcp.gcsio import GcsIO
    from requests.adapters import HTTPAdapter

    storage = GcsIO(pipeline_options=FileSystems.get_filesystem("gs://")._pipeline_options)
    for scheme in ("https://", "http://"):
        storage.client._http.mount(scheme, HTTPAdapter(pool_maxsize=_CONNECTIONS))
    return storage
