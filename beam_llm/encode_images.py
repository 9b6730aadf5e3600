"""EncodeImages: the step between batching and sending, in which bodies are built and pictures become base64."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import apache_beam as beam

from beam_llm.body import BodyBuilder, Draft, PreparedRequest
from beam_llm.config import ChatConfig
from beam_llm.dofn import Windowed
from beam_llm.records import FailedRequest

_IMAGE_THREADS = 128
"""Pictures loaded side by side: hides a bucket's 50 ms an object; cores decode."""

_BUSY_THREADS = max(4, os.cpu_count() or 1)
"""Threads that load pictures which need not be waited for."""

_BATCH_IMAGE_BYTES = 32 << 20
"""Encoded pictures of a batch, about: all of them are in memory at the same time."""

Prepared = PreparedRequest | FailedRequest


class Batch(list[Any]):
    """Requests with their bodies, on their way from `EncodeImages` to `ChatCompletionDoFn`."""


class BatchCoder(beam.coders.Coder):
    """Pickle, for runners that do not fuse the two steps. Beam also asks it how large some of the batches are: by
    itself it would pickle all their pictures to find out."""

    def encode(self, value: Batch) -> bytes:
        """The batch as bytes."""
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)

    def decode(self, encoded: bytes) -> Batch:
        """The batch again."""
        batch: Batch = pickle.loads(encoded)  # noqa: S301 - what this job has encoded
        return batch

    def estimate_size(self, value: Batch) -> int:
        """Bytes of the bodies."""
        items = (item.value if isinstance(item, Windowed) else item for item in value)
        return sum(item.body.size for item in items if isinstance(item, PreparedRequest))

    def is_deterministic(self) -> bool:
        """Not needed: a batch is no key."""
        return False


beam.coders.registry.register_coder(Batch, BatchCoder)


class EncodeImages:
    """A function for `beam.Map`: a batch of requests -> the batch with bodies built and images encoded to base64.

    Pictures of a batch are loaded and encoded side by side. A request that cannot be sent becomes a `FailedRequest`.

    Args:
        config: As for `ChatCompletionDoFn`.
    """

    def __init__(self, config: ChatConfig) -> None:
        self._config = config
        self._builder: BodyBuilder | None = None
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_config": self._config, "_builder": None, "_pool": None}

    def __call__(self, batch: list[Any]) -> Batch:
        """The batch, in order; items may be requests, failures, or either in a `Windowed`."""
        if self._builder is None:
            self._builder = BodyBuilder(self._config)
        requests = [item.value if isinstance(item, Windowed) else item for item in batch]
        prepared = list(self._prepare(self._builder, requests))
        return Batch(
            Windowed(done, item.wv) if isinstance(item, Windowed) else done
            for item, done in zip(batch, prepared, strict=True)
        )

    def _prepare(self, builder: BodyBuilder, requests: list[Any]) -> Iterator[Prepared]:
        drafts = [r if isinstance(r, FailedRequest) else builder.draft(r) for r in requests]
        loading = [draft for draft in drafts if not isinstance(draft, FailedRequest) and draft.references]
        if loading and self._pool is None:
            self._pool = ThreadPoolExecutor(_IMAGE_THREADS, thread_name_prefix="beam_llm-images")
        loaded = iter(self._load(builder, loading))
        for draft in drafts:
            if isinstance(draft, FailedRequest):
                yield draft
            else:
                yield next(loaded) if draft.references else builder.finish(draft)

    def _load(self, builder: BodyBuilder, drafts: list[Draft]) -> Iterator[Prepared]:
        """Finishes drafts side by side, in order: each on a thread of its own where one has to wait for pictures; else
        a few threads take a share each, as handing one over takes as long as reading a file."""
        if not drafts:
            return
        assert self._pool is not None
        quick = builder.loads_quickly(drafts)
        share = math.ceil(len(drafts) / _BUSY_THREADS) if quick else 1
        shares = [drafts[i : i + share] for i in range(0, len(drafts), share)]
        for finished in [
            self._pool.submit(lambda part: [builder.finish(draft) for draft in part], part) for part in shares
        ]:
            yield from finished.result()


def picture_weight(images: int, mean_bytes: float, batch_size: int) -> int:
    """What a request with pictures counts in a batch of `batch_size`, so that a batch has some 32 MB of them.

    Args:
        images: How many pictures the request has.
        mean_bytes: What one is expected to take, encoded.
        batch_size: What the weights of a batch add up to.
    """
    return min(batch_size, max(1, round(images * mean_bytes * batch_size / _BATCH_IMAGE_BYTES)))
