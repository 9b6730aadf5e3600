"""From a request to the key of its answer in the response store: equal exactly where the same question is asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import orjson

_FORM = b"beam_llm 1\n"
"""Hashed first. Another number makes every stored answer unknown; change it with the canonical form."""

_IMAGE = "data:image/"


def request_key(namespace: str, custom_id: str, path: str, body: Mapping[str, Any]) -> str:
    """The key of a request's answer: 40 hex digits.

    The order of an object's keys does not matter, nor the media type that a base64 picture is labelled with (servers
    go by the bytes). All else does: `1` and `1.0` differ, and so do fields that no server may know. The base URL is
    not part of it, so that a job can move to another replica.

    Args:
        namespace: `--store_namespace`; keeps jobs apart that share ids, model name and questions.
        custom_id: The caller's id: the same question under two ids is asked twice.
        path: URL path of the endpoint.
        body: What is posted, pictures as data URLs or as their `picture_hash`.

    Raises:
        TypeError: A value that JSON cannot say.
        RecursionError: Nested some hundred levels deep.
    """
    digest = hashlib.sha256(_FORM)
    for field in (namespace, custom_id, path):
        text = field.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%b" % (len(text), text))
    digest.update(canonical_json(body))
    return digest.hexdigest()[:40]


def canonical_json(body: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys and with every picture replaced by its hash; NaN is null, as on the wire.

    Raises:
        TypeError: A value that JSON cannot say.
    """
    folded = _fold(body)
    try:
        return orjson.dumps(folded, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        # orjson refuses half surrogate pairs and integers beyond 64 bits. No text it writes has such an escape or such
        # a number in it, so the two ways cannot give the same bytes for different bodies.
        return json.dumps(folded, sort_keys=True, separators=(",", ":")).encode()


class PictureHash(str):
    """Stands for a data URL in a canonical body. Begins as one, so that no other text can become the same: each that
    does is replaced."""

    __slots__ = ()


def picture_hash(head: bytes, payload: bytes) -> PictureHash:
    """What stands for a picture of a body in the hash of the body.

    Args:
        head: `data:image/…;base64,`, of which only the form matters.
        payload: The base64 text, which stands for the bytes: 0.9 ms for a 1 MB picture; decoding it first takes 1.3.
    """
    if head.endswith(b";base64,"):
        return PictureHash(f"{_IMAGE}#base64,{hashlib.sha256(payload).hexdigest()}")
    whole = hashlib.sha256(head)
    whole.update(payload)
    return PictureHash(f"{_IMAGE}#text,{whole.hexdigest()}")


def _fold(value: Any) -> Any:
    """The value with string keys only, and with hashes for pictures."""
    if isinstance(value, str):
        return _fold_text(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _json_key(key): _fold(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_fold(item) for item in value]
    return value


def _json_key(key: object) -> str:
    name: str = next(iter(json.loads(json.dumps({key: 0}))))
    return name


def _fold_text(text: str) -> str:
    if not text.startswith(_IMAGE) or isinstance(text, PictureHash):
        return text
    url = text.encode("utf-8", "surrogatepass")
    start = url.find(b",", 0, 256) + 1
    return picture_hash(url[:start], url[start:])
