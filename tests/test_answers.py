from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from beam_llm.answers import answer_flaw, judge_answer
from beam_llm.body import BodyBuilder, PreparedRequest
from beam_llm.config import ChatConfig
from beam_llm.driver import Driver
from beam_llm.errors import ErrorKind
from beam_llm.records import ChatRequest, Completion, FailedRequest, Outcome
from beam_llm.retry import RetryPolicy
from tests.endpoint import ScriptedEndpoint

EVERYTHING = ("truncated", "refused", "filtered")


def completion(finish: str | None, **message: Any) -> dict[str, Any]:
    return {"choices": [{"message": message, "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("body", "flaw"),
    [
        (completion("stop", content="4"), None),
        (completion("stop", content=""), None),
        (completion("stop", content=[{"type": "text", "text": "x"}]), None),
        (completion("stop", content=None, audio={"id": "a"}), None),
        (completion("tool_calls", content=None, tool_calls=[{"id": "t1"}]), None),
        (completion("length", content=None, reasoning_content="thinking…"), ErrorKind.TRUNCATED),
        (completion("length", content='{"a": 1,'), ErrorKind.TRUNCATED),
        (completion("content_filter", content=""), ErrorKind.FILTERED),
        (completion("stop", content=None, refusal="cannot help"), ErrorKind.REFUSED),
        (completion("stop", content=None, refusal=None), ErrorKind.NULL_CONTENT),
        (completion(None, content=None), ErrorKind.NULL_CONTENT),
        ({"choices": [{"text": "x", "finish_reason": "stop"}]}, None),
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, None),
        ({"choices": [{"finish_reason": "stop", "message": "not an object"}]}, ErrorKind.NULL_CONTENT),
        ({"data": []}, None),
    ],
)
def test_each_kind_of_answer_is_told_apart(body: dict[str, Any], flaw: ErrorKind | None) -> None:
    """C03, C04, C05, C06."""
    assert answer_flaw(body) == flaw


@pytest.mark.parametrize("fail_on", [(), EVERYTHING])
def test_null_content_is_a_failure_and_tried_again(fail_on: tuple[str, ...]) -> None:
    verdict = judge_answer(completion("stop", content=None), fail_on)
    assert verdict is not None
    assert (verdict.kind, verdict.retryable, verdict.stops_run) == (ErrorKind.NULL_CONTENT, True, False)


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (completion("length", content="half"), "truncated", "token limit"),
        (completion("content_filter", content="half"), "filtered", "filtered"),
        (completion("stop", content=None, refusal="cannot help"), "refused", "cannot help"),
    ],
)
def test_flawed_answers_fail_only_where_the_user_wants_it_and_are_not_asked_again(
    body: dict[str, Any], kind: str, words: str
) -> None:
    assert judge_answer(body) is None
    verdict = judge_answer(body, (kind,))
    assert verdict is not None
    assert (verdict.kind, verdict.retryable) == (kind, False)
    assert words in verdict.message


def outcomes(body: dict[str, Any], fail_on: tuple[str, ...] = ()) -> tuple[list[Outcome], int]:
    """What becomes of one request that is always answered with a body, and how often it was sent."""

    async def always(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(body)

    with ScriptedEndpoint(always) as endpoint:
        retry = RetryPolicy(initial_backoff_s=0, max_backoff_s=0)
        config = ChatConfig(base_urls=(endpoint.base_url,), model="m", retry=retry, fail_on=fail_on)
        prepared = BodyBuilder(config).prepare(ChatRequest("a", {"messages": "hello"}))
        assert isinstance(prepared, PreparedRequest)
        driver = Driver(config)
        channel = driver.channel()
        channel.submit([(None, prepared)])
        found = []
        while channel.pending:
            found += [outcome for _, outcome in channel.wait(for_room=False)]
        driver.close()
        return found, len(endpoint.requests)


@pytest.mark.parametrize(
    "body", [completion("stop", content=None), {"choices": []}], ids=["null content", "no choices"]
)
def test_an_answer_with_nothing_in_it_is_bought_three_times_at_most(body: dict[str, Any]) -> None:
    """C02: a resend usually helps or none does; each was paid for."""
    found, sent = outcomes(body)
    assert len(found) == 1
    assert isinstance(found[0], FailedRequest)
    assert (sent, found[0].attempts) == (3, 3)


def test_a_cut_off_answer_is_a_completion_unless_the_user_says_otherwise() -> None:
    body = completion("length", content="half", reasoning_content="thought")
    completions, _ = outcomes(body)
    assert isinstance(completions[0], Completion)
    failures, sent = outcomes(body, ("truncated",))
    assert isinstance(failures[0], FailedRequest)
    assert (failures[0].kind, failures[0].answer, sent) == (ErrorKind.TRUNCATED, body, 1)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "image_url"}], None),
        (None, None),
    ],
)
def test_the_answer_is_text_in_either_form(content: Any, text: str | None) -> None:
    assert Completion("a", completion("stop", content=content)).answer == text


@pytest.mark.parametrize(
    ("custom_id", "reference", "says"),
    [(3, "x.png", "custom_id: expected a string, got 3"), ("a", [[1, 2]], "image"), ("a", object(), "image")],
)
def test_what_python_code_may_put_into_a_request_fails_the_row_only(custom_id: Any, reference: Any, says: str) -> None:
    config = ChatConfig(base_urls=("http://h",), model="m", response_store="sqlite:///unused.db")
    request = ChatRequest(custom_id, {"messages": [{"type": "image", "value": reference}]})
    outcome = BodyBuilder(config).prepare(request)
    assert isinstance(outcome, FailedRequest)
    assert says in outcome.message
