"""What a server answered, from its bytes to the record: the reported cases that are about classification."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from beam_llm.driver import Driver
from beam_llm.errors import ErrorKind, RunStoppedError
from beam_llm.formats import openai_batch, row_results
from beam_llm.jsontext import loads
from beam_llm.records import ChatRequest, Completion, FailedRequest
from beam_llm.retry import RetryPolicy
from tests.asking import REPLY, Asking, read_request, serve
from tests.endpoint import ScriptedEndpoint, echo
from tests.pipelines import config
from tests.replies import Replies, Reply, choice, through_beam
from tests.test_driver import drain, prepare

HTML = b"<html><head><title>Bad gateway</title></head>" + b"<p>x</p>" * 2500 + b"</html>"


def embedded(code: Any) -> Reply:
    """A 200 whose body is an error."""
    return Reply(200, {"error": {"message": "slow down", **({} if code is None else {"code": code})}, "user_id": "u"})


def test_an_error_inside_a_200_is_judged_by_its_own_code() -> None:
    """C01: never a completion, never a key error; 429, 5xx and what says nothing are tried again, 4xx not."""
    codes: dict[str, Any] = {"number": 429, "upstream": 502, "text": "429", "none": None, "permanent": 400}
    replies = Replies({name: [embedded(code)] * 2 for name, code in codes.items()})
    with ScriptedEndpoint(replies) as endpoint:
        ran = through_beam(config(endpoint), list(codes))
    assert {name: c.retried for name, c in ran.completed.items()} == {
        "number": (ErrorKind.RATE_LIMIT,) * 2,
        "upstream": (ErrorKind.SERVER_ERROR,) * 2,
        "text": (ErrorKind.RATE_LIMIT,) * 2,
        "none": (ErrorKind.SERVER_ERROR,) * 2,
    }
    failed = ran.failed["permanent"]
    assert (failed.kind, failed.attempts, failed.message) == (ErrorKind.INVALID_REQUEST, 1, "slow down")


NOTHING = Reply(200, {"id": "x", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 0}})


def test_an_empty_list_of_choices_is_asked_again_a_few_times_and_then_fails_with_its_body() -> None:
    """C02: each answer was paid for, so the limit is lower than that of other retries."""
    with ScriptedEndpoint(Replies({"once": [NOTHING]})) as endpoint:
        once = through_beam(config(endpoint), ["once"]).completed["once"]
    with ScriptedEndpoint(Replies({"always": [NOTHING]}, always=True)) as endpoint:
        ran = through_beam(config(endpoint, retry=RetryPolicy(9, 0.001, 0.002, max_empty_retries=2)), ["always"])
    assert (once.answer, once.retried) == ("once", (ErrorKind.EMPTY_CHOICES,))
    failed = ran.failed["always"]
    assert (failed.kind, failed.attempts, failed.status_code) == (ErrorKind.EMPTY_CHOICES, 3, 200)
    assert loads((failed.body or "").encode()) == NOTHING.body


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_that_used_up_the_budget_is_kept_and_never_becomes_the_answer(field: str) -> None:
    """C03: a completion that says `truncated`, or with fail_on a failure that keeps the whole answer; sent once."""
    replies = Replies({"q": [choice("length", content=None, **{field: "thinking…"})]}, always=True)
    with ScriptedEndpoint(replies) as endpoint:
        completion = through_beam(config(endpoint), ["q"]).completed["q"]
        failed = through_beam(config(endpoint, fail_on=("truncated",)), ["q"]).failed["q"]
    assert replies.sent == {"q": 2}
    assert (completion.answer, completion.reasoning, completion.finish_reason) == (None, "thinking…", "length")
    assert loads(openai_batch.write_outcome(completion))["beam_llm"]["kind"] == "truncated"
    written = loads(row_results.write_outcome(completion))
    assert (written["answer"], written["reasoning"], written["finish_reason"]) == (None, "thinking…", "length")
    assert failed.kind is ErrorKind.TRUNCATED
    assert failed.answer is not None
    assert failed.answer["choices"][0]["message"][field] == "thinking…"


CALL = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_a_refusal_and_a_tool_call_are_completions_and_no_empty_answers() -> None:
    """C04, C05: content is null, and something says why; sent once, kept whole."""
    replies = Replies(
        {
            "refused": [choice(content=None, refusal="cannot help")],
            "tool": [choice("tool_calls", content=None, tool_calls=[CALL])],
            "empty": [choice(content=None)],
        },
        always=True,
    )
    with ScriptedEndpoint(replies) as endpoint:
        ran = through_beam(config(endpoint, retry=RetryPolicy(0)), ["refused", "tool", "empty"])
    assert replies.sent == {"refused": 1, "tool": 1, "empty": 1}
    assert loads(row_results.write_outcome(ran.completed["refused"]))["refusal"] == "cannot help"
    assert loads(openai_batch.write_outcome(ran.completed["refused"]))["beam_llm"]["kind"] == "refused"
    assert ran.completed["tool"].message == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert loads(openai_batch.write_outcome(ran.completed["tool"]))["beam_llm"]["kind"] == "completed"
    assert ran.failed["empty"].kind is ErrorKind.NULL_CONTENT


def test_a_cut_off_answer_says_so_is_counted_and_not_bought_again() -> None:
    """C06."""
    replies = Replies(
        {"cut": [choice("length", content='{"a": 1, "b": [1, 2')], "filtered": [choice("content_filter", content="I")]}
    )
    with ScriptedEndpoint(replies) as endpoint:
        ran = through_beam(config(endpoint), ["cut", "filtered", "whole"])
    assert {name: completion.finish_reason for name, completion in ran.completed.items()} == {
        "cut": "length",
        "filtered": "content_filter",
        "whole": "stop",
    }
    assert ran.counters["requests_sent"] == 3
    assert {name: n for name, n in ran.counters.items() if name.startswith("finish_")} == {
        "finish_length": 1,
        "finish_content_filter": 1,
        "finish_stop": 1,
    }
    kinds = {name: loads(openai_batch.write_outcome(c))["beam_llm"]["kind"] for name, c in ran.completed.items()}
    assert kinds == {"cut": "truncated", "filtered": "filtered", "whole": "completed"}


def test_an_answer_without_token_counts_is_an_answer() -> None:
    """C07: missing, null, empty, or half of it."""
    usages: dict[str, dict[str, Any]] = {
        "missing": {},
        "null": {"usage": None},
        "empty": {"usage": {}},
        "half": {"usage": {"prompt_tokens": 7, "completion_tokens": None}},
    }
    said = [{"message": {"content": "yes"}, "finish_reason": "stop"}]
    replies = Replies({name: [Reply(200, {"choices": said, **usage})] for name, usage in usages.items()})
    with ScriptedEndpoint(replies) as endpoint:
        ran = through_beam(config(endpoint, tokens_per_minute=1e6), list(usages))
    assert ran.answers() == dict.fromkeys(usages, "yes")
    assert (ran.counters["answers_without_usage"], ran.counters["prompt_tokens"]) == (3, 7)
    assert "completion_tokens" not in ran.counters


def test_the_html_page_of_a_gateway_is_retried_by_its_status_and_shortened_in_the_record() -> None:
    """C08."""
    statuses = ["502", "503", "504", "520", "521", "522", "524", "529"]
    page = {status: Reply(int(status), HTML, "text/html") for status in statuses}
    with ScriptedEndpoint(Replies({status: [reply] for status, reply in page.items()})) as endpoint:
        passing = through_beam(config(endpoint), statuses)
    with ScriptedEndpoint(Replies({"502": [page["502"]]}, always=True)) as endpoint:
        failed = through_beam(config(endpoint), ["502"]).failed["502"]
    assert {name: c.attempts for name, c in passing.completed.items()} == dict.fromkeys(statuses, 2)
    assert (failed.kind, failed.status_code, failed.attempts) == (ErrorKind.SERVER_ERROR, 502, 4)
    assert failed.message == "Bad gateway"
    assert (failed.body or "").startswith("<html>")
    assert len(openai_batch.write_outcome(failed)) < 4000


@pytest.mark.parametrize("content_type", ["text/plain; charset=utf-8", "json", "application/octet-stream", None])
def test_the_content_type_of_an_answer_plays_no_part(content_type: str | None) -> None:
    """C09."""
    named = b"" if content_type is None else f"Content-Type: {content_type}\r\n".encode()
    head = b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n" % (named, len(REPLY))

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(head + REPLY)
        await writer.drain()
        writer.close()

    outcomes: list[Any] = []

    async def ask_once() -> None:
        server, url = await serve(connected)
        async with server:
            asking = Asking(url)
            outcomes.append(await asking())
            await asking.client.close()

    asyncio.run(asyncio.wait_for(ask_once(), 10))
    assert [type(outcome) for outcome in outcomes] == [Completion]
    assert outcomes[0].answer == "ok"


def test_an_error_of_any_shape_is_judged_by_its_status_and_tells_its_words() -> None:
    """C10: `error` may be a string, a list of details, an empty object, or nothing at all."""
    overloaded = Reply(429, {"error": "Model is overloaded", "error_type": "overloaded"})
    replies = Replies(
        {
            "string": [Reply(422, {"error": "`inputs` is too long", "error_type": "validation"})] * 9,
            "overloaded": [overloaded],
            "detail": [Reply(500, {"detail": [{"loc": ["body"], "msg": "x"}]})] * 9,
            "object": [Reply(400, {})] * 9,
            "nothing": [Reply(400, b"")] * 9,
        }
    )
    with ScriptedEndpoint(replies) as endpoint:
        ran = through_beam(config(endpoint), ["string", "overloaded", "detail", "object", "nothing"])
    assert ran.completed["overloaded"].retried == (ErrorKind.OVERLOADED,)
    assert {name: (f.kind.value, f.attempts, f.message) for name, f in ran.failed.items()} == {
        "string": ("invalid_request", 1, "`inputs` is too long"),
        "detail": ("server_error", 4, "body: x"),
        "object": ("invalid_request", 1, "HTTP 400 Bad Request with nothing in the body"),
        "nothing": ("invalid_request", 1, "HTTP 400 Bad Request with nothing in the body"),
    }


FLAT = {"object": "error", "message": "At most 1 image(s) may be provided", "type": "BadRequestError", "code": 400}
INNER = {"content_filter_result": {"violence": {"filtered": True}}}
FILTER = {"error": {"code": "content_filter", "innererror": INNER}}
CONTEXT = {"error": {"code": "context_length_exceeded", "message": "This model's maximum context length is 2048"}}
RAW = {"error": {"message": "Provider returned error", "metadata": {"raw": "pool exhausted", "provider_name": "P"}}}


def test_a_row_that_a_server_refuses_is_sent_once_and_tells_why_and_the_others_go_on() -> None:
    """C11, C12, C13: too many pictures, a content filter, a prompt that is too long."""
    replies = Replies({"flat": [Reply(400, FLAT)], "filter": [Reply(400, FILTER)], "context": [Reply(400, CONTEXT)]})
    others = [f"row {n}" for n in range(7)]
    with ScriptedEndpoint(replies) as endpoint:
        ran = through_beam(config(endpoint, retry=RetryPolicy(4, 0.001, 0.002)), ["flat", "filter", "context", *others])
    assert set(replies.sent.values()) == {1}
    assert ran.answers() == {text: text for text in others}
    assert {name: failed.kind.value for name, failed in ran.failed.items()} == {
        "flat": "invalid_request",
        "filter": "content_filter",
        "context": "context_length",
    }
    assert ran.failed["flat"].message == FLAT["message"]
    assert loads((ran.failed["filter"].body or "").encode()) == FILTER


def test_the_cause_that_a_router_hides_in_its_metadata_is_in_the_record() -> None:
    """C91."""
    with ScriptedEndpoint(Replies({"q": [Reply(429, RAW)]}, always=True)) as endpoint:
        failed = through_beam(config(endpoint), ["q"]).failed["q"]
    assert failed.message == "Provider returned error: pool exhausted"
    assert loads((failed.body or "").encode()) == RAW


def test_the_400_of_a_provider_that_could_not_fetch_a_picture_in_time_is_tried_again() -> None:
    """C14: only this one; a picture that is none stays a failure."""

    def refusal(message: str) -> Reply:
        return Reply(400, {"error": {"code": "invalid_image_url", "message": message}})

    rows = {"slow": [refusal("Timeout while downloading https://h/a.png")], "bad": [refusal("Not a picture")]}
    with ScriptedEndpoint(Replies(rows)) as endpoint:
        ran = through_beam(config(endpoint), list(rows))
    assert ran.completed["slow"].retried == (ErrorKind.TIMEOUT,)
    assert (ran.failed["bad"].kind, ran.failed["bad"].attempts) == (ErrorKind.INVALID_REQUEST, 1)


PARAMETER = {"error": {"code": "unsupported_parameter", "param": "max_tokens", "message": "Use max_completion_tokens"}}
QUOTA = {"error": {"code": "insufficient_quota", "message": "You exceeded your current quota"}}


@pytest.mark.parametrize(("status", "body", "says"), [(400, PARAMETER, "Use max_completion"), (429, QUOTA, "quota")])
def test_what_every_row_would_hear_stops_the_run_early_and_a_rerun_asks_them_all(
    status: int, body: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """C15, C18: a parameter that the model refuses, an account that is empty; 1,000 rows, tens of requests."""
    texts = [f"row {n}" for n in range(1000)]
    store = f"sqlite:///{tmp_path}/answers.db"
    with ScriptedEndpoint(Replies({text: [Reply(status, body)] for text in texts}, always=True)) as endpoint:
        settings = config(endpoint, response_store=store)
        driver = Driver(settings)
        channel = driver.channel()
        channel.submit(prepare(settings, texts))
        with pytest.raises(RunStoppedError, match=says):
            list(drain(channel))
        driver.close()
        assert len(endpoint.requests) < 60
    with ScriptedEndpoint(echo) as endpoint:
        assert through_beam(config(endpoint, response_store=store), texts).answers() == {text: text for text in texts}


def test_a_wanted_format_is_passed_on_and_the_answer_taken_as_it_is() -> None:
    """C16: whether a server honours an option is not checked, and the README says so."""
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    with ScriptedEndpoint(Replies({"q": [choice(content="Sure! Here is…")]})) as endpoint:
        ran = through_beam(config(endpoint), [ChatRequest("q", {"messages": "q", "response_format": wanted})])
        assert [body["response_format"] for body in endpoint.requests] == [wanted]
    assert ran.answers() == {"q": "Sure! Here is…"}
    readme = " ".join((Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8").split())
    assert "whether the server honoured one, such as `response_format`, is not checked" in readme


def test_overload_in_whatever_dress_is_tried_again() -> None:
    """C17: status 529, and 400 with the word in the body's type only."""
    overloaded = Reply(400, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})
    with ScriptedEndpoint(Replies({"q": [Reply(529, {}), overloaded]})) as endpoint:
        completion = through_beam(config(endpoint), ["q"]).completed["q"]
    assert completion.retried == (ErrorKind.OVERLOADED,) * 2


def test_the_message_of_a_404_names_the_full_url() -> None:
    """C41: a base URL that is wrong shows at the first glance."""
    with ScriptedEndpoint(Replies({"q": [Reply(404, {"detail": "Not Found"})]})) as endpoint:
        failed = through_beam(config(endpoint), ["q", "r"]).failed["q"]
    assert isinstance(failed, FailedRequest)
    assert f"{endpoint.base_url}/chat/completions" in failed.message
    assert "Not Found" in failed.message
