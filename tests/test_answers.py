from __future__ import annotations

from typing import Any

import pytest

from beam_llm.answers import answer_flaw, judge_answer
from beam_llm.errors import ErrorKind

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
