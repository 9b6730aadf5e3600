"""Each row's replies of a scripted endpoint, and what comes of rows that go through ChatCompletion in a pipeline."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from aiohttp import web

from beam_llm.config import ChatConfig
from beam_llm.records import ChatRequest, Completion, FailedRequest
from beam_llm.transforms import ChatCompletion
from tests.endpoint import answer, last_text
from tests.pipelines import Gathered, counters, local


@dataclass(frozen=True, slots=True)
class Reply:
    """One response of a server; `body` is sent as JSON, or as it is if it is bytes."""

    status: int
    body: Any
    content_type: str = "application/json"

    def response(self) -> web.Response:
        """It as aiohttp sends it; a response of aiohttp can be sent only once."""
        data = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        return web.Response(status=self.status, body=data, content_type=self.content_type)


def choice(finish_reason: str | None = "stop", **message: Any) -> Reply:
    """A 200 with one choice."""
    found = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return Reply(200, {"id": "x", "choices": [found], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


class Replies:
    """A handler for `ScriptedEndpoint` that knows rows by the text that they ask.

    Args:
        rows: A row's replies, in turn. After them, and for every other row, the answer is the text itself.
        always: The last reply of a row is given again and again.

    Attributes:
        sent: How often each text was asked.
    """

    def __init__(self, rows: Mapping[str, Sequence[Reply]], *, always: bool = False) -> None:
        self._rows = rows
        self._always = always
        self.sent: Counter[str] = Counter()

    async def __call__(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """The next reply for the row."""
        text = last_text(body)
        replies, turn = self._rows.get(text, ()), self.sent[text]
        self.sent[text] += 1
        if replies and (self._always or turn < len(replies)):
            return replies[min(turn, len(replies) - 1)].response()
        return answer(text)


@dataclass(frozen=True, slots=True)
class Ran:
    """What a pipeline made of its requests, by `custom_id`."""

    completed: dict[str, Completion]
    failed: dict[str, FailedRequest]
    counters: dict[str, int]

    def answers(self) -> dict[str, str | None]:
        """The text of each completion."""
        return {custom_id: completion.answer for custom_id, completion in self.completed.items()}


def through_beam(config: ChatConfig, requests: Sequence[str | ChatRequest]) -> Ran:
    """Asks requests, or texts that are their own ids, in a pipeline of this process; each gives exactly one record."""
    asked = [ChatRequest(r, {"messages": r}) if isinstance(r, str) else r for r in requests]
    done, failed = Gathered(), Gathered()
    pipeline = beam.Pipeline(options=local())
    results = pipeline | beam.Create(asked, reshuffle=False) | ChatCompletion(config)
    _ = results.completed | "Completed" >> beam.ParDo(done)
    _ = results.failed | "Failed" >> beam.ParDo(failed)
    result = pipeline.run()
    result.wait_until_finish()
    records = [*done.values, *failed.values]
    assert sorted(record.custom_id for record in records) == sorted(request.custom_id for request in asked)
    return Ran({c.custom_id: c for c in done.values}, {f.custom_id: f for f in failed.values}, counters(result))
