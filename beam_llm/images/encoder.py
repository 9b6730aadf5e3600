"""ImageEncoder: from a reference in a message to the URL that is sent; pictures that recur are made once."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

from beam_llm.errors import ErrorKind, RequestError
from beam_llm.images import DataURL, ImagePolicy, data_url, encode_image
from beam_llm.images.loading import bare_reference, describe_reference, load_image, locate, scheme_of
from beam_llm.spill import Deferred

_UNKNOWN_BYTES = 4e6
_QUICK_S = 0.01
_NEWEST = 0.1
"""Share of the newest picture in the running mean."""


class RecentURLs:
    """The data URLs made last, up to a number of bytes, by what they were made of. Safe to use from many threads.

    Whoever asks for a picture that another thread is just making waits for that one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._made: OrderedDict[Hashable, DataURL] = OrderedDict()
        self._making: dict[Hashable, Future[DataURL]] = {}
        self._bytes = 0

    def get(self, key: Hashable, make: Callable[[], DataURL]) -> DataURL:
        """The URL of a key, made if it is not there. What `make` raises is raised, and forgotten."""
        ours: Future[DataURL] = Future()
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
            others = self._making.get(key)
            if others is None:
                self._making[key] = ours
        if others is not None:
            return others.result()
        try:
            url = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            ours.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
            self._keep(key, url)
        ours.set_result(url)
        return url

    def _keep(self, key: Hashable, url: DataURL) -> None:
        if len(url) > self._max_bytes:
            return
        self._made[key] = url
        self._bytes += len(url)
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._made.popitem(last=False)[1])


class ImageEncoder:
    """Loads and encodes the pictures of messages under one policy. Safe to use from many threads.

    Args:
        policy: What may be read, and how it is sent.
    """

    def __init__(self, policy: ImagePolicy) -> None:
        self._policy = policy
        self._recent = RecentURLs(policy.cache_bytes)
        self._mean_load_s = 0.0
        self.mean_bytes = _UNKNOWN_BYTES
        """Running mean of the size of the data URLs that were made."""

    def url(self, reference: Any, beside: str | None = None) -> DataURL | str:
        """The URL that a message carries for a reference: a data URL, or an http(s) URL as it was given.

        Args:
            reference, beside: See `load_image`.

        Raises:
            RequestError: The picture cannot be read or cannot be sent; the message names the reference.
        """
        if isinstance(reference, Deferred):
            reference = reference.load()
        name = f"image {describe_reference(reference)}"
        try:
            bare = bare_reference(reference)
        except RequestError as error:
            raise RequestError(f"{name} {error.message}", ErrorKind.BAD_IMAGE) from error
        if isinstance(bare, str) and scheme_of(bare) in ("http", "https") and not self._policy.fetch_images:
            return bare
        key = self._key(bare, beside) if self._policy.cache_bytes else None
        if key is None:
            return self._make(bare, name, beside)
        return self._recent.get(key, lambda: self._make(bare, name, beside))

    def loads_quickly(self, reference: Any) -> bool:
        """Whether a picture need not be waited for: it is at hand, or on a disk that has been quick so far."""
        is_remote = isinstance(reference, str) and scheme_of(reference) not in ("", "data", "file")
        return not is_remote and self._mean_load_s < _QUICK_S

    def _make(self, reference: Any, name: str, beside: str | None) -> DataURL:
        begun_s = time.perf_counter()
        loaded = load_image(reference, self._policy, beside)
        self._mean_load_s += _NEWEST * (time.perf_counter() - begun_s - self._mean_load_s)
        assert not isinstance(loaded, str), "http(s) URLs that are passed on are not loaded"
        url = data_url(encode_image(loaded, self._policy, name))
        self.mean_bytes += _NEWEST * (len(url) - self.mean_bytes)
        return url

    def _key(self, reference: Any, beside: str | None) -> Hashable | None:
        """What tells a picture that is read from somewhere; None for one that is at hand."""
        if not isinstance(reference, str) or (scheme := scheme_of(reference)) in ("data", "file"):
            return None
        place = reference if scheme else locate(reference, self._policy, beside)
        if "://" in place:
            return place
        try:
            # A file that is written anew while the run goes on is another picture.
            status = os.stat(os.path.join(self._policy.root or "", place))
        except (OSError, ValueError):
            return None
        return place, status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=4)
def process_encoder(policy: ImagePolicy) -> ImageEncoder:
    """The encoder that all steps of this process share."""
    return ImageEncoder(policy)
