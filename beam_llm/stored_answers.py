"""Finished answers in a response store: which ones are kept, and how a record is written there and read back."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from beam_llm.answers import answer_flaw
from beam_llm.body import PreparedRequest
from beam_llm.errors import ErrorKind
from beam_llm.jsontext import dumps, loads
from beam_llm.records import Completion
from beam_llm.stores import ResponseStore, StoreError

_LOGGER = logging.getLogger(__name__)


def is_finished(completion: Completion, finish_reasons: Collection[str]) -> bool:
    """Whether an answer may stand for its request in every later run.

    A cut-off, filtered or empty answer may not: the next run, with another budget or another model behind the name,
    would be served it for ever.

    Args:
        completion: The answer.
        finish_reasons: Reasons that count as finished; every choice must have one of them.
    """
    choices = completion.body.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    reasons = {choice.get("finish_reason") if isinstance(choice, dict) else None for choice in choices}
    return reasons <= set(finish_reasons) and answer_flaw(completion.body) is not ErrorKind.NULL_CONTENT


class StoredAnswers:
    """A response store as the driver uses it. Lives on the driver's event loop.

    A store that breaks during the run costs no row: requests are sent as if nothing were known, answers go out marked
    `not_stored`, and the store is not asked again, since each time would wait for its timeout.

    Args:
        store: Opened by `open`.
        finish_reasons: See `is_finished`.
    """

    def __init__(self, store: ResponseStore, finish_reasons: Collection[str]) -> None:
        self._store = store
        self._finish_reasons = frozenset(finish_reasons)
        self._broken = False

    async def open(self) -> None:
        """Connects.

        Raises:
            StoreError: The store cannot be used.
        """
        await self._store.open()

    async def close(self) -> None:
        """Commits what is pending and disconnects."""
        await self._store.close()

    async def find(self, requests: Sequence[PreparedRequest]) -> list[Completion | None]:
        """The stored answer of each request, or None; in order."""
        values: dict[str, bytes] = {}
        if not self._broken:
            try:
                values = await self._store.get_many(list({p.key for p in requests if p.key is not None}))
            except StoreError as error:
                self._give_up(error)
        return [_read(values[p.key], p) if p.key in values else None for p in requests]

    async def keep(self, key: str, completion: Completion) -> Completion:
        """Commits a finished answer before it is emitted; returns it, marked if it could not be stored."""
        if not is_finished(completion, self._finish_reasons):
            return completion
        if not self._broken:
            try:
                await self._store.put(key, _write(completion))
                return completion
            except StoreError as error:
                self._give_up(error)
        return replace(completion, not_stored=True)

    def _give_up(self, error: StoreError) -> None:
        if not self._broken:
            self._broken = True
            _LOGGER.error("beam_llm: answers are no longer stored: %s", error)


def _write(completion: Completion) -> bytes:
    return dumps(
        {
            "body": completion.body,
            "status_code": completion.status_code,
            "request_id": completion.request_id,
            "endpoint": completion.endpoint,
        }
    )


def _read(value: bytes, prepared: PreparedRequest) -> Completion | None:
    """The stored answer of a request; None for a value that is damaged, whose request is then sent again."""
    try:
        kept: Any = loads(value)
        body, status_code = kept["body"], kept["status_code"]
        request_id, endpoint = kept["request_id"], kept["endpoint"]
    except (ValueError, KeyError, TypeError):
        return None
    request = prepared.request
    return Completion(
        custom_id=request.custom_id,
        body=body,
        status_code=status_code,
        request_id=request_id,
        attempts=0,
        endpoint=endpoint,
        source="store",
        context=request.context,
        origin=request.origin,
    )
