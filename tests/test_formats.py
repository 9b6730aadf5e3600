"""Lines to requests and outcomes to lines: OpenAI Batch, rows, and what the two share."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_llm.errors import ConfigError, ErrorKind, RequestError
from beam_llm.formats import openai_batch, row_results, rows
from beam_llm.formats.common_row import as_text, custom_id_of, parse_object, source_of, without_data_urls
from beam_llm.formats.rows import RowColumns
from beam_llm.jsontext import dumps
from beam_llm.messages import to_messages
from beam_llm.records import CHAT_COMPLETIONS, ChatRequest, Completion, FailedRequest, Origin

HERE = Origin("gs://bucket/rows.jsonl", 17)
PICTURE = "data:image/png;base64," + "A" * 1000
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ANSWER: dict[str, Any] = {
    "id": "chatcmpl-1",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1},
    "vendor_field": {"kept": True},
}


def answer(message: dict[str, Any], **choice: Any) -> Completion:
    choices = [{"message": message, "finish_reason": "stop", **choice}]
    return Completion("row-1", {"choices": choices}, context={"prompt": "2+2"}, origin=HERE)


def failed(**fields: Any) -> FailedRequest:
    return FailedRequest(**{"custom_id": "row-1", "kind": ErrorKind.SERVER_ERROR, "message": "why", **fields})


def row_request(row: Any, **columns: Any) -> ChatRequest:
    return rows.request_of_row(parse_object(dumps(row)), HERE, RowColumns(**columns))


def parsed(line: bytes) -> Any:
    assert b"\n" not in line
    return json.loads(line.decode("utf-8"), parse_constant=pytest.fail)


# What the formats share


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a":"\xe0\x41"}', "the line is not UTF-8: byte 0xe0 at position 6"),
        (b'{"a":', "the line is not JSON: "),
        (b"", "the line is not JSON: "),
        (b'["a"]', "the line is not a JSON object but list: ['a']"),
        (b"null", "the line is not a JSON object but NoneType"),
    ],
)
def test_a_line_that_is_no_object_is_refused_with_the_place(line: bytes, reason: str) -> None:
    """C45: an error of one row, whatever its bytes."""
    with pytest.raises(RequestError) as caught:
        parse_object(line)
    assert caught.value.message.startswith(reason)
    assert caught.value.kind is ErrorKind.BAD_INPUT
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("row", "custom_id"),
    [
        ({"custom_id": "x"}, "x"),
        ({"custom_id": 7}, "7"),
        ({"custom_id": 0}, "0"),
        ({"custom_id": ""}, "gs://bucket/rows.jsonl:17"),
        ({"custom_id": None}, "gs://bucket/rows.jsonl:17"),
        ({"custom_id": 3.0}, "3"),
        ({"custom_id": 2.5}, "2.5"),
        ({"custom_id": math.nan}, "gs://bucket/rows.jsonl:17"),
        ({"custom_id": ["x"]}, "gs://bucket/rows.jsonl:17"),
        ({}, "gs://bucket/rows.jsonl:17"),
    ],
)
def test_a_row_without_a_usable_id_is_named_by_its_place(row: dict[str, Any], custom_id: str) -> None:
    """C47: every row has an id, the same in every run."""
    assert custom_id_of(row, HERE) == custom_id


@pytest.mark.parametrize("fields", [{"custom_id": "x"}, {"custom_id": "x", "a": 1}, {"custom_id": ""}, {}])
@pytest.mark.parametrize("output", [openai_batch, row_results])
def test_rows_with_the_same_id_can_be_told_apart_by_their_place(output: Any, fields: dict[str, Any]) -> None:
    """C47: nothing is dropped; file and offset are the second key, and ids of results are unique and lasting."""
    lines = []
    for offset in (0, 40):
        origin = Origin("a.jsonl", offset)
        request = openai_batch.request_of_line({**fields, "body": BODY}, origin)
        lines.append(output.write_outcome(failed(custom_id=request.custom_id, origin=origin)))
    assert lines[0] != lines[1]
    if output is openai_batch:
        assert parsed(lines[0])["id"] != parsed(lines[1])["id"]


@pytest.mark.parametrize(
    ("outcome", "source"),
    [
        (Completion("a", {}), "server"),
        (Completion("a", {}, source="store"), "store"),
        (failed(attempts=1), "server"),
        (failed(), "client"),
    ],
)
def test_source_tells_where_an_outcome_came_from(outcome: Any, source: str) -> None:
    assert source_of(outcome) == source


def test_pictures_are_cut_out_of_what_is_written_and_nothing_else() -> None:
    """C64."""
    value = {"a": [PICTURE, "data:,short", "see data:image/png;base64," + "A" * 1000], "b": {"c": PICTURE}, "n": 1.5}
    kept = without_data_urls(value)
    assert kept["a"] == ["data:image/png;base64,… (1022 characters)", *value["a"][1:]]  # type: ignore[index]
    assert (kept["b"]["c"], kept["n"]) == (kept["a"][0], 1.5)
    assert value["b"] == {"c": PICTURE}


def test_a_line_that_cannot_be_read_is_kept_in_a_safe_form() -> None:
    """C45: the raw bytes can be told from the record."""
    assert as_text(b'{"a":"\xe0\x41"}') == '{"a":"\\xe0A"}'
    assert len(as_text(b"x" * 5000)) == 2048


# OpenAI Batch


def test_a_batch_line_becomes_its_request() -> None:
    line = dumps({"custom_id": "r", "method": "POST", "url": CHAT_COMPLETIONS, "body": {**BODY, "vendor": None}})
    assert openai_batch.request_of_line(parse_object(line), HERE) == ChatRequest(
        "r", {**BODY, "vendor": None}, CHAT_COMPLETIONS, origin=HERE
    )


def test_method_and_url_of_a_batch_line_may_be_left_out() -> None:
    assert openai_batch.request_of_line({"body": BODY}, HERE).path == CHAT_COMPLETIONS


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "body: expected an object, got None"),
        ({"body": "x" * 5000}, "body: expected an object, got 'xxx"),
        ({"body": BODY, "method": "GET"}, "method: expected 'POST', got 'GET'"),
        ({"body": BODY, "url": "/v1/embeddings"}, "url: expected '/v1/chat/completions', got '/v1/embeddings'"),
    ],
)
def test_a_batch_line_with_a_wrong_field_is_refused_by_its_name(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        openai_batch.request_of_line(parse_object(dumps(row)), HERE)
    assert caught.value.message.startswith(reason)
    assert len(caught.value.message) < 200


def test_an_answer_is_written_whole_as_a_batch_result() -> None:
    outcome = Completion("r", ANSWER, 200, "req-1", 2, 12.34, "http://h/v1", origin=HERE)
    line = parsed(openai_batch.write_outcome(outcome))
    assert line.pop("id").startswith("beam_llm-")
    assert line == {
        "custom_id": "r",
        "response": {"status_code": 200, "request_id": "req-1", "body": ANSWER},
        "error": None,
        "beam_llm": {
            "kind": "completed",
            "attempts": 2,
            "latency_ms": 12.3,
            "endpoint": "http://h/v1",
            "source": "server",
            "file": "gs://bucket/rows.jsonl",
            "offset": 17,
        },
    }


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ('{"error":{"message":"no"}}', {"error": {"message": "no"}}),
        ("<html>502</html>", "<html>502</html>"),
        ('{"error":{"mess', '{"error":{"mess'),
        (None, None),
    ],
)
def test_a_failure_keeps_the_servers_words_in_a_batch_result(words: str | None, body: Any) -> None:
    line = parsed(openai_batch.write_outcome(failed(status_code=500, body=words, request_id="q", attempts=3)))
    assert line["response"] == {"status_code": 500, "request_id": "q", "body": body}
    assert line["error"] == {"code": "server_error", "message": "why"}
    assert (line["beam_llm"]["kind"], line["beam_llm"]["attempts"]) == ("server_error", 3)
    assert (line["beam_llm"]["file"], line["beam_llm"]["offset"]) == (None, None)


def test_a_request_that_was_never_sent_has_no_response_and_keeps_its_input() -> None:
    outcome = failed(kind=ErrorKind.BAD_INPUT, context={"image": PICTURE}, origin=HERE)
    line = parsed(openai_batch.write_outcome(outcome))
    assert line["response"] is None
    assert line["beam_llm"]["source"] == "client"
    assert line["beam_llm"]["input"] == {"image": "data:image/png;base64,… (1022 characters)"}


ODD = {"logprob": -math.inf, "text": "half \ud835 \u2028", "\ud835": math.nan}


@pytest.mark.parametrize("output", [openai_batch, row_results])
@pytest.mark.parametrize(
    "outcome", [answer({"content": "a\ud835b", "odd": ODD}, logprobs=ODD), failed(context=ODD, message="\ud835")]
)
def test_odd_characters_and_numbers_never_stop_the_output(output: Any, outcome: Any) -> None:
    """C44, C57, C58: one line of strict JSON, whatever a server or a row holds."""
    line = parsed(output.write_outcome(outcome))
    assert line["custom_id"] == "row-1"


# Rows


@pytest.mark.parametrize(
    ("row", "columns", "parts"),
    [
        ({"prompt": "hi"}, {}, ["hi"]),
        ({"prompt": "hi", "image": "a.png"}, {}, ["a.png", "hi"]),
        ({"prompt": "hi", "images": ["a.png", "b.png"], "image": None}, {}, ["a.png", "b.png", "hi"]),
        ({"q": "2+2"}, {"prompt": "Say {q}."}, ["Say 2+2."]),
        ({"q": "{x}", "n": 1.5, "l": [1, "é"]}, {"prompt": "{{q}} {q} {n} {l}"}, ['{q} {x} 1.5 [1,"é"]']),
        ({"q": "a"}, {"prompt": ""}, [""]),
        ({"q": "a", "p": "1", "r": ["2"]}, {"prompt": "{q}", "image_columns": ("r", "p")}, ["2", "1", "a"]),
        ({"a.b": "x", "0": "y"}, {"prompt": "{a.b} {0}"}, ["x y"]),
    ],
)
def test_columns_of_a_row_make_its_message_pictures_first(
    row: dict[str, Any], columns: dict[str, Any], parts: list[str]
) -> None:
    request = row_request(row, **columns)
    content: Any = to_messages(request.body["messages"])[0]["content"]
    is_text = isinstance(content, str)
    given = [content] if is_text else [part.get("text") or part["image_url"]["url"] for part in content]
    assert given == parts
    assert is_text == (len(parts) == 1)  # without pictures it is what every server takes
    assert is_text or parts[-1] == "" or content[-1]["type"] == "text"


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": "own"}, {}),
        ({"messages": "own", "prompt": "not this"}, {}),
        ({"m": "own", "messages": "not this"}, {"messages_column": "m"}),
        ({"body": {"messages": "own"}, "prompt": "not this"}, {"prompt": "{missing}"}),
    ],
)
def test_messages_of_a_row_go_before_its_prompt(row: dict[str, Any], columns: dict[str, Any]) -> None:
    assert row_request(row, **columns).body == {"messages": "own"}


def test_only_body_and_model_of_a_row_are_sent_and_the_row_comes_back() -> None:
    row = {"custom_id": 5, "prompt": "hi", "model": "m", "temperature": 9, "body": {"seed": 1}, "label": "cat"}
    request = row_request(row)
    assert request.body == {"model": "m", "seed": 1, "messages": "hi"}
    assert (request.custom_id, request.context, request.origin) == ("5", row, HERE)


def test_model_in_the_body_of_a_row_wins_over_its_column() -> None:
    assert row_request({"prompt": "hi", "model": "a", "body": {"model": "b"}}).body["model"] == "b"


@pytest.mark.parametrize(
    ("row", "columns", "reason"),
    [
        ({}, {}, "column 'prompt' is missing; the row has no columns"),
        ({"prompt": None, "x": 1}, {}, "column 'prompt' is null; the row has 'prompt', 'x'"),
        ({"prompt": 7}, {}, "prompt: expected a string, got 7"),
        ({"x": 1}, {"prompt": "{q}"}, "column 'q' is missing; the row has 'x'"),
        ({"x": 1}, {"messages_column": "m"}, "column 'm' is missing"),
        ({"q": "a"}, {"prompt": "{q}", "image_columns": ("p",)}, "column 'p' is missing"),
        ({"prompt": "a", "body": "b"}, {}, "body: expected an object of request fields, got 'b'"),
        ({f"column_{n}": 1 for n in range(1000)}, {}, "column 'prompt' is missing; the row has 'column_0'"),
    ],
)
def test_a_row_that_lacks_a_column_is_refused_by_its_name(
    row: dict[str, Any], columns: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError) as caught:
        row_request(row, **columns)
    assert caught.value.message.startswith(reason)
    assert len(caught.value.message) <= 500


@given(st.text(st.sampled_from("{}ab.[]0!: "), max_size=8))
def test_a_template_either_works_for_rows_with_its_columns_or_is_refused_at_once(template: str) -> None:
    try:
        columns = RowColumns(prompt=template)
    except ConfigError:
        return
    row = dict.fromkeys(columns.template_columns(), "value")
    assert isinstance(rows.request_of_row(row, HERE, columns).body["messages"], str)


@pytest.mark.parametrize("template", ["{", "}", "{}", "{a:>5}", "{a!r}", '{"json": {a}}'])
def test_a_template_that_cannot_be_meant_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"^prompt: .*twice"):
        RowColumns(prompt=template)


@pytest.mark.parametrize(
    "columns",
    [{"prompt": "a", "messages_column": "m"}, {"prompt": "", "messages_column": "messages"}],
)
def test_columns_that_exclude_each_other_are_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        RowColumns(**columns)


def test_an_answered_row_is_the_row_with_the_answers_columns() -> None:
    row = {"custom_id": "old", "prompt": "2+2", "image": PICTURE, "empty": None}
    line = parsed(row_results.write_outcome(Completion("row-1", ANSWER, context=row)))
    assert line == {
        "custom_id": "row-1",
        "prompt": "2+2",
        "image": "data:image/png;base64,… (1022 characters)",
        "empty": None,
        "answer": "4",
        "reasoning": None,
        "finish_reason": "stop",
        "usage": ANSWER["usage"],
    }


@pytest.mark.parametrize(
    ("outcome", "columns"),
    [
        (answer({"content": None, "refusal": "no"}), {"answer": None, "refusal": "no"}),
        (answer({"content": None, "tool_calls": [{"id": "t"}]}), {"answer": None, "tool_calls": [{"id": "t"}]}),
        (answer({"content": "a", "reasoning_content": "hm"}), {"answer": "a", "reasoning": "hm"}),
        (answer({"reasoning": "hm"}, finish_reason="length"), {"answer": None, "finish_reason": "length"}),
        (answer({"content": "a"}, logprobs={"content": []}), {"logprobs": {"content": []}}),
        (Completion("r", {"choices": [{"index": 0}, {"index": 1}]}), {"choices": [{"index": 0}, {"index": 1}]}),
        (Completion("r", {"choices": None, "usage": None}), {"answer": None, "usage": {}}),
    ],
)
def test_all_parts_of_an_answer_have_their_column(outcome: Completion, columns: dict[str, Any]) -> None:
    """C03, C04, C05, C07: reasoning, refusals and tool calls are kept apart from the answer."""
    line = parsed(row_results.write_outcome(outcome))
    assert {name: line[name] for name in columns} == columns


def test_a_column_with_the_name_of_one_of_ours_is_kept_beside_it() -> None:
    row = {"answer": "expected", "usage": 1, "input_answer": "taken", "error": "old"}
    line = parsed(row_results.write_outcome(Completion("r", ANSWER, context=row)))
    assert (line["answer"], line["input_error"]) == ("4", "old")
    assert "expected" in line.values()
    assert "taken" in line.values()
    assert line["input_usage"] == 1


def test_a_failed_row_is_the_row_with_its_error() -> None:
    outcome = failed(status_code=500, body="oops", attempts=3, context={"prompt": "2+2"}, origin=HERE)
    assert parsed(row_results.write_outcome(outcome)) == {
        "prompt": "2+2",
        "custom_id": "row-1",
        "error": {
            "kind": "server_error",
            "message": "why",
            "status_code": 500,
            "body": "oops",
            "attempts": 3,
            "source": "server",
            "file": "gs://bucket/rows.jsonl",
            "offset": 17,
        },
    }


@pytest.mark.parametrize(("context", "given_back"), [("not json {", {"input": "not json {"}), (None, {})])
def test_what_was_no_row_comes_back_as_input(context: Any, given_back: dict[str, Any]) -> None:
    line = parsed(row_results.write_outcome(failed(context=context)))
    assert {name: value for name, value in line.items() if name == "input"} == given_back


MANY = {"images": ["a.png", "b.png"]}
TWO = [{"type": "image", "value": "a.png"}, {"type": "image", "value": "b.png"}]


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": "which?", **MANY}, [*TWO, said("which?")]),
        ({"prompt": "<image> or\n<image>\n?", **MANY}, [TWO[0], said(" or"), TWO[1], said("?")]),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], **MANY},
            [{"role": "system", "content": "s"}, {"role": "user", "content": [*TWO, said("q")]}],
        ),
        (
            {
                "messages": [{"role": "user", "content": "<image>\n<image>\nq"}, {"role": "assistant", "content": "a"}],
                **MANY,
            },
            [{"role": "user", "content": [*TWO, said("q")]}, {"role": "assistant", "content": "a"}],
        ),
        (
            {
                "messages": [{"role": "user", "content": [said("<image> and"), {"type": "image", "url": None}]}],
                "image": "a.png",
            },
            [{"role": "user", "content": [said("<image> and"), TWO[0]]}],
        ),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "own.png"}}]}],
                **MANY,
            },
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "own.png"}}]}],
        ),
        ({"prompt": "the <image> tag", "image": None}, "the <image> tag"),
        ({"prompt": "both?", "images": '["a.png", "b.png"]'}, [*TWO, said("both?")]),
        ({"prompt": "one?", "image": " a.png "}, [TWO[0], said("one?")]),
        ({"messages": '[{"role": "user", "content": "q"}]'}, [{"role": "user", "content": "q"}]),
        ({"messages": "[see note]"}, "[see note]"),
    ],
)
def test_every_picture_of_a_row_has_its_place_in_the_messages(row: dict[str, Any], messages: Any) -> None:
    assert row_request(row).body["messages"] == messages


@pytest.mark.parametrize(
    ("row", "columns", "reason"),
    [
        ({"messages": "<image>?", **MANY}, {}, "messages: 1 times <image>, and the image columns have 2 pictures"),
        ({"messages": "[{'role': 'user'}]"}, {}, "column 'messages': looks like a list and is no JSON"),
        ({"prompt": "q", "images": "['a.png', 'b.png']"}, {}, "column 'images': looks like a list and is no JSON"),
        ({"messages": None, "image": "a.png"}, {}, "column 'messages' is null"),
        ({"b": b"bytes"}, {"prompt": "{b}"}, "column 'b' holds bytes, which a prompt cannot"),
        ({"b": [{"bytes": b"x", "path": None}]}, {"prompt": "{b}"}, "column 'b' holds bytes, which a prompt cannot"),
    ],
)
def test_a_row_whose_parts_do_not_go_together_is_refused(
    row: dict[str, Any], columns: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError) as caught:
        rows.request_of_row(row, HERE, RowColumns(**columns))
    assert caught.value.message.startswith(reason)
