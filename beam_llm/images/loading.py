"""From an image reference (path, URL, data URL, bytes, PIL image, `{bytes, path}`) to what `encode_image` takes.

Who may write references decides what a worker reads: `ImagePolicy.root` confines paths to a folder, `fetch_images`
and `allow_private_addresses` are off unless asked for, and what is no picture never leaves `encode_image`.
"""

from __future__ import annotations

import binascii
import errno
import os
import random
import re
import stat
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import pybase64
from PIL import Image

from beam_llm.errors import ErrorKind, RequestError
from beam_llm.images import ImagePolicy
from beam_llm.images.fetch import fetch_once, with_retries
from beam_llm.images.storage import check_storage_url, read_storage_once
from beam_llm.spill import Deferred, Spilled

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters and more, as `C:` is a drive
_LONGEST_DESCRIPTION = 200
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


def load_image(
    reference: Any,
    policy: ImagePolicy,
    beside: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
    rng: Callable[[], float] = random.random,
) -> bytes | Image.Image | str:
    """Read the picture that a reference names. Safe to call from many threads.

    Args:
        reference: A path (`str`, `os.PathLike`), a `file:` or `data:` URL, an http(s) URL, a URL of a file system
            that Beam knows (`gs://`, …), bytes, a PIL image, a mapping of `bytes` and `path`, where bytes win, or a
            `Deferred` of any of these.
        policy: What may be read, and how much.
        beside: The file that the reference stands in; see `locate`. None: no file.
        sleep, rng: For the back-off between the tries of a remote read.

    Returns:
        The file's bytes, a PIL image as it was given, or an http(s) URL as it was given unless
        `policy.fetch_images` is set: the model server then downloads it.

    Raises:
        RequestError: It cannot or may not be read; the message names the reference.
    """
    try:
        data = _load(reference, policy, beside, sleep, rng)
        if isinstance(data, bytes) and not data:
            raise _refused("is empty")
        return data
    except RequestError as error:
        raise _refused(f"image {describe_reference(reference)} {error.message}") from error


def describe_reference(reference: Any) -> str:
    """A reference for a message: at most 200 characters, no picture data, no query or password of a URL."""
    if isinstance(reference, Spilled):
        reference = reference.head if reference.head is not None else "in bytes"
    if isinstance(reference, Mapping):
        path = reference.get("path")
        return describe_reference(path) if path else "in bytes"
    if isinstance(reference, Image.Image):
        return f"in memory ({reference.mode} {reference.width}x{reference.height})"
    if isinstance(reference, (bytes, bytearray, memoryview)):
        return f"in bytes ({len(reference)})"
    if not isinstance(reference, (str, os.PathLike)):
        return f"of type {type(reference).__name__}"
    text = os.fsdecode(reference) if isinstance(reference, os.PathLike) else reference
    if text[:5].lower() == "data:":
        return f"{text[:40].partition(',')[0]},…"
    if _SCHEME.match(text) and "://" in text:
        scheme, _, rest = text.partition("://")
        rest = re.split(r"[?#]", rest, maxsplit=1)[0]
        host, slash, path = rest.partition("/")
        text = f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
    if len(text) > _LONGEST_DESCRIPTION:
        text = f"{text[:120]}…{text[-70:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def bare_reference(reference: Any) -> Any:
    """What a mapping of `bytes` and `path` (as in Hugging Face data sets and Parquet files) or a `Deferred` stands for.

    Raises:
        RequestError: The mapping has neither.
    """
    if isinstance(reference, Deferred):
        reference = reference.load()
    if isinstance(reference, Mapping):
        data = reference.get("bytes")
        if isinstance(data, str):
            raise _refused("has text in `bytes`; write base64 as a data URL: data:image/png;base64,…")
        reference = bare_reference(data) if isinstance(data, Deferred) else data or reference.get("path")
        if not reference:
            raise _refused("has neither `bytes` nor `path`")
    return os.fsdecode(reference) if isinstance(reference, os.PathLike) else reference


def scheme_of(reference: str) -> str:
    """`data`, `http`, `gs`, … in small letters; empty for a path."""
    found = _SCHEME.match(reference)
    return found[1].lower() if found else ""


def locate(path: str, policy: ImagePolicy, beside: str | None) -> str:
    """Where a path leads: relative ones start at `policy.root`; without one at the folder of the file that they stand
    in, as in data sets that come with their pictures, or else at the current folder.

    Args:
        path: A local path, absolute or relative.
        policy: Its root.
        beside: The file that the path stands in, local or a URL; None: no file.

    Returns:
        A local path, or a URL if root or file are in a bucket.
    """
    if os.path.isabs(path):
        return path
    if policy.root is not None:
        return f"{policy.root.rstrip('/')}/{path}" if "://" in policy.root else path
    if beside is None:
        return path
    folder, slash, _ = beside.rpartition("/")
    neighbour = f"{folder}{slash}{path}"
    return neighbour if "://" in neighbour or os.path.lexists(neighbour) else path


def _load(
    reference: Any, policy: ImagePolicy, beside: str | None, sleep: Callable[[float], None], rng: Callable[[], float]
) -> bytes | Image.Image | str:
    reference = bare_reference(reference)
    if isinstance(reference, Image.Image):
        return reference
    if isinstance(reference, (bytes, bytearray, memoryview)):
        return bytes(reference)
    if not isinstance(reference, str) or not reference:
        raise _refused("is no image reference; give a path, a URL, bytes or a PIL image")
    scheme = scheme_of(reference)
    if scheme == "data":
        return _decode_data_url(reference, policy.max_download_bytes)
    if scheme in ("http", "https"):
        if not urlsplit(reference).hostname:
            raise _refused("is a URL without a host")
        if not policy.fetch_images:
            return reference
        return with_retries(lambda: fetch_once(reference, policy), sleep, rng)
    if scheme == "file":
        return _read_local(_file_url_path(reference), policy)
    if "://" in (path := reference if "://" in reference else locate(reference, policy, beside)):
        check_storage_url(path, policy.root)
        return with_retries(lambda: read_storage_once(path, policy.max_download_bytes), sleep, rng)
    return _read_local(path, policy)


def _refused(reason: str) -> RequestError:
    return RequestError(reason, ErrorKind.BAD_IMAGE)


def _decode_data_url(url: str, limit: int) -> bytes:
    """The bytes of a base64 data URL; padding may be missing, blanks, escapes and the URL alphabet are understood."""
    head, comma, payload = url.partition(",")
    if not comma or not head.rstrip().lower().endswith(";base64"):
        raise _refused("is a data URL without `;base64,`")
    if len(payload) > limit * 4 // 3 + 4:
        raise _refused(f"is larger than max_download_bytes ({limit})")
    try:
        return pybase64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        pass  # the usual form is decoded without a copy; now the tolerant way
    try:
        clean = b"".join(unquote_to_bytes(payload).split()).rstrip(b"=").translate(bytes.maketrans(b"-_", b"+/"))
        return pybase64.b64decode(clean + b"=" * (-len(clean) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"is not base64 ({error})") from error


def _file_url_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise _refused(f"is a file URL of another host ({unquote(parts.netloc)})")
    return url2pathname(parts.path)


def _read_local(path: str, policy: ImagePolicy) -> bytes:
    """Read a regular file, whole. Devices and pipes, which may never end, are refused."""
    try:
        if policy.root is not None:
            path = _inside_root(path, policy.root)
        # O_NONBLOCK: opening a pipe would wait for its writer.
        with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | _NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _refused("is no regular file")
            if status.st_size > policy.max_download_bytes:
                raise _refused(f"has {status.st_size} bytes, more than max_download_bytes")
            return file.readall()
    except OSError as error:
        looked = "" if os.path.isabs(path) else f", looked for {os.path.abspath(path)}"
        known = {errno.ENOENT: f"does not exist{looked}", errno.EISDIR: "is a folder", errno.EACCES: "may not be read"}
        raise _refused(known.get(error.errno or 0, f"cannot be read ({error.strerror})")) from error
    except ValueError as error:  # a NUL byte, a lone surrogate
        raise _refused(f"is no path ({error})") from error


def _inside_root(path: str, root: str) -> str:
    """The file with every link resolved, if that is inside the root."""
    if "://" in root:
        raise _refused(f"is a local file; only {root} may be read")
    real_root = os.path.realpath(root)
    real = os.path.realpath(os.path.join(real_root, path))
    if os.path.commonpath((real_root, real)) != real_root:
        raise _refused(f"is outside the root {root}")
    return real
