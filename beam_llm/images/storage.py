"""Read a picture from a storage system that Beam knows (`gs://`, `s3://`, …), with one client for the process."""

from __future__ import annotations

import functools
import io
import threading
import zlib
from base64 import b64decode
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import google_crc32c
import urllib3
from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems

from beam_llm.errors import ErrorKind, RequestError
from beam_llm.images.fetch import TransientReadError

_FINAL_ERRORS = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,
    ImportError,
    AssertionError,
)
_RETRYABLE_STATUS = (408, 425, 429)
_CONNECTIONS = 128
"""Kept open to Cloud Storage, one for each thread that loads pictures."""

_TIMEOUT = urllib3.Timeout(connect=10, read=60)
_ERROR_BYTES = 2000
_CHUNK_BYTES = 1 << 20
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
        if url.startswith("gs://"):
            return _read_object(url, limit)
        with FileSystems.open(url, compression_type=CompressionTypes.UNCOMPRESSED) as file:
            body = _Bounded(limit)
            while chunk := file.read(_CHUNK_BYTES):
                body.write(chunk)
            return body.getvalue()
    except RequestError:
        raise
    except Exception as error:  # each storage library has its own tree: told apart by status
        status = _status_of(error)
        reason = f"cannot be read ({type(error).__name__}: {error})"[:300]
        if isinstance(error, FileNotFoundError) or status == 404:
            raise _refused("does not exist") from error
        is_final = 400 <= status < 500 and status not in _RETRYABLE_STATUS
        if is_final or isinstance(error, _FINAL_ERRORS):
            raise _refused(reason) from error
        raise TransientReadError(reason) from error


def _status_of(error: Exception) -> int:
    """The HTTP status that a storage library's exception carries; 0 if none."""
    for name in ("code", "status_code", "status"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return int(value)
    return 0


class _Bounded(io.BytesIO):
    """Takes so many bytes and no more."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any, /) -> int:
        """As of a file.

        Raises:
            RequestError: That is too much.
        """
        if self.tell() + len(data) > self._limit:
            raise _refused(f"is larger than max_download_bytes ({self._limit})")
        return super().write(data)


def _read_object(url: str, limit: int) -> bytes:
    """An object of Cloud Storage as it is stored, in one request.

    The storage library's own download takes 1.4 ms of CPU an object, which bounds a process to some 450 objects/s; the
    request alone takes 0.35. Beam's reader asks for the metadata first.
    """
    from apache_beam.io.gcp.gcsio import parse_gcs_path

    with _client_lock:
        endpoint, http = _cloud_storage()
    bucket, name = parse_gcs_path(url)
    target = f"{endpoint}/download/storage/v1/b/{quote(bucket, safe='')}/o/{quote(name, safe='')}?alt=media"
    # Accepting gzip, one gets what is stored; else the server would unpack it, and its checksum would differ.
    headers = {"Accept-Encoding": "gzip"}
    response = http.request("GET", target, headers=headers, preload_content=False, redirect=False, timeout=_TIMEOUT)
    body = _Bounded(limit)
    try:
        if response.status != 200:
            words = response.read(_ERROR_BYTES, decode_content=False).decode("utf-8", "replace")
            raise _StatusError(response.status, words)
        if int(response.headers.get("Content-Length", 0)) > limit:
            raise _refused(f"is larger than max_download_bytes ({limit})")
        for chunk in response.stream(_CHUNK_BYTES, decode_content=False):
            body.write(chunk)
    except BaseException:
        response.close()  # what was not read to its end cannot be used again
        raise
    response.release_conn()
    return _as_uploaded(body.getvalue(), response.headers, limit)


def _as_uploaded(data: bytes, headers: Mapping[str, str], limit: int) -> bytes:
    """Checks the checksum that came with an object, and unpacks what was stored as gzip."""
    hashes = dict(part.strip().split("=", 1) for part in headers.get("X-Goog-Hash", "").split(",") if "=" in part)
    if "crc32c" in hashes and b64decode(hashes["crc32c"]) != google_crc32c.value(data).to_bytes(4, "big"):
        raise TransientReadError("did not come through whole: its checksum differs")
    if headers.get("Content-Encoding") != "gzip":
        return data
    unpacked = zlib.decompressobj(wbits=31).decompress(data, limit + 1)
    if len(unpacked) > limit:
        raise _refused(f"is larger than max_download_bytes ({limit})")
    return unpacked


class _StatusError(Exception):
    """An answer of Cloud Storage that is no object."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"{code} {words}".strip())
        self.code = code


@functools.lru_cache(maxsize=1)
def _cloud_storage() -> tuple[str, Any]:
    """Where Cloud Storage is, and connections to it with the credentials that Beam finds."""
    from apache_beam.io.gcp.gcsio import GcsIO
    from google.auth.transport.urllib3 import AuthorizedHttp

    client = GcsIO(pipeline_options=FileSystems.get_filesystem("gs://")._pipeline_options).client
    connections = urllib3.PoolManager(maxsize=_CONNECTIONS, retries=False)
    return client.api_endpoint.rstrip("/"), AuthorizedHttp(client._credentials, http=connections)
