"""The one line that a failure is shown as: where, why, short, without secrets and pictures."""

from __future__ import annotations

import base64
import os

from beam_llm.errors import ErrorKind
from beam_llm.failure_examples import MAX_EXAMPLE_CHARS, failure_example, prompt_failures
from beam_llm.records import FailedRequest


def failed(message: str, custom_id: str = "r1", **settings: object) -> FailedRequest:
    return FailedRequest(custom_id, ErrorKind.INVALID_REQUEST, message, **settings)  # type: ignore[arg-type]


def test_a_refusal_names_its_row_its_status_and_its_endpoint() -> None:
    shown = failure_example(failed("no such field", status_code=422, endpoint="http://h/v1?code=secret"))
    assert shown == "r1 (HTTP 422 from http://h/v1): no such field"


def test_what_was_never_sent_or_answered_names_what_there_is() -> None:
    assert failure_example(failed("not JSON", "a.jsonl:0")) == "a.jsonl:0: not JSON"
    assert failure_example(failed("refused", "", endpoint="http://h")) == "a row without an id (http://h): refused"


def test_secrets_and_pictures_that_a_server_repeats_are_left_out() -> None:
    data = base64.b64encode(os.urandom(150)).decode()
    said = f"Bearer sk-canary123456 sent data:image/png;base64,{data[:50]} and {data}\nin two lines"
    shown = failure_example(failed(said, "sk-canary123456"))
    assert "canary" not in shown
    assert data[:50] not in shown
    assert shown.endswith("sent data:image/png;base64,… and … in two lines")


def test_a_long_path_is_no_picture() -> None:
    path = "/data/" + "folder/" * 15 + "cat.jpg"
    assert path in failure_example(failed(f"{path} is missing"))


def test_an_example_has_a_length_that_any_row_keeps_to() -> None:
    shown = failure_example(failed("word " * 500, "id-" * 2000))
    assert len(shown) == MAX_EXAMPLE_CHARS
    assert shown.startswith("id-" * 26 + "i…: word word")


def test_prompts_are_told_by_kind_with_the_first_of_each() -> None:
    reasons = {7: "bad_image: gone", 2: "timeout: late: 5 s", 5: "bad_image: broken"}
    assert prompt_failures(reasons) == [
        "2 failed (bad_image), for example prompt 5: broken",
        "1 failed (timeout), for example prompt 2: late: 5 s",
    ]
    assert prompt_failures({}) == []
