"""From an image reference (path, URL, data URL, bytes, PIL image, `{bytes, path}`) to what `encode_image` takes.

Who may write references decides what a worker reads: `ImagePolicy.root` confines paths to a folder, `fetch_images`
and `allow_private_addresses` are off unless asked for, and what is no picture never leaves `encode_image`.
"""

from __future__ import annotations

import binascii
import errno
import os
import posixpath
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
from beam_llm.images import ImagePolicy, data_url, encode_image
from beam_llm.images.fetch import fetch_once, with_retries
from beam_llm.images.storage import check_storage_url, read_storage_once

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters and more, as `C:` is a drive
_LONGEST_DESCRIPTION = 200
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


def image_url(reference: Any, policy: ImagePolicy) -> str:
    """The URL that a message carries for an image reference: a data URL, or an http(s) URL as it was given.

    Raises:
        RequestError: The picture cannot be read or cannot be sent; the message names the reference.
    """
    loaded = load_image(reference, policy)
    if isinstance(loaded, str):
        return loaded
    return data_url(encode_image(loaded, policy, f"image {describe_reference(reference)}"))


def load_image(
    reference: Any,
    policy: ImagePolicy,
    sleep: Callable[[float], None] = time.sleep,
    rng: Callable[[], float] = random.random,
) -> bytes | Image.Image | str:
    """Read the picture that a reference names. Safe to call from many threads.

    Args:
        reference: A path (`str`, `os.PathLike`), a `file:` or `data:` URL, an http(s) URL, a URL of a file system
            that Beam knows (`gs://`, …), bytes, a PIL image, or a mapping of `bytes` and `path`, where bytes win.
        policy: What may be read, and how much.
        sleep, rng: For the back-off between the tries of a remote read.

    Returns:
        The file's bytes, a PIL image as it was given, or an http(s) URL as it was given unless
        `policy.fetch_images` is set: the model server then downloads it.

    Raises:
        RequestError: It cannot or may not be read; the message names the reference.
    """
    try:
        data = _load(reference, policy, sleep, rng)
        if isinstance(data, bytes) and not data:
            raise _refused("is empty")
        return data
    except RequestError as error:
        raise _refused(f"image {describe_reference(reference)} {error.message}") from error


def describe_reference(reference: Any) -> str:
    """A reference for a message: at most 200 characters, no picture data, no query or password of a URL."""
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


def _load(
    reference: Any, policy: ImagePolicy, sleep: Callable[[float], None], rng: Callable[[], float]
) -> bytes | Image.Image | str:
    if isinstance(reference, Mapping):  # as in Hugging Face data sets and Parquet files
        reference = reference.get("bytes") or reference.get("path")
        if not reference:
            raise _refused("has neither `bytes` nor `path`")
    if isinstance(reference, Image.Image):
        return reference
    if isinstance(reference, (bytes, bytearray, memoryview)):
        return bytes(reference)
    if isinstance(reference, os.PathLike):
        reference = os.fsdecode(reference)
    if not isinstance(reference, str) or not reference:
        raise _refused("is no image reference; give a path, a URL, bytes or a PIL image")
    found = _SCHEME.match(reference)
    scheme = found[1].lower() if found else ""
    if scheme == "data":
        return _decode_data_url(reference, policy.max_download_bytes)
    if scheme in ("http", "https"):
        if not policy.fetch_images:
            return reference
        return with_retries(lambda: fetch_once(reference, policy), sleep, rng)
    if scheme == "file":
        return _read_local(_file_url_path(reference), policy)
    if "://" in (path := reference if "://" in reference else _under_remote_root(reference, policy)):
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
        known = {errno.ENOENT: "does not exist", errno.EISDIR: "is a folder", errno.EACCES: "may not be read"}
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


def _under_remote_root(path: str, policy: ImagePolicy) -> str:
    """A relative path joined to a root like `gs://bucket/images`; any other path as it is."""
    if policy.root is None or "://" not in policy.root or posixpath.isabs(path):
        return path
    return f"{policy.root.rstrip('/')}/{path}"
