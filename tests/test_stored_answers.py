from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from beam_llm.body import BodyBuilder, PreparedRequest
from beam_llm.config import ChatConfig
from beam_llm.driver import Driver
from beam_llm.errors import ConfigError
from beam_llm.records import ChatRequest, Completion, FailedRequest, Origin, Outcome
from beam_llm.retry import RetryPolicy
from beam_llm.stored_answers import is_finished
from beam_llm.stores import StoreError
from tests.endpoint import ScriptedEndpoint, answer, last_text

NO_RETRIES = RetryPolicy(max_retries=0, initial_backoff_s=0, max_backoff_s=0)


async def by_text(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """`cut …` is cut off, `null …` is empty, `bad …` is a 500, `stop …` and everything else is answered with itself."""
    text = last_text(body)
    if text.startswith("bad"):
        return web.json_response({"error": {"message": "broken"}}, status=500)
    if text.startswith("null"):
        return answer(None)
    return answer(text, finish_reason="length" if text.startswith("cut") else "stop")


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(by_text) as running:
        yield running


def config(endpoint: ScriptedEndpoint, store: str, **settings: Any) -> ChatConfig:
    return ChatConfig(base_urls=(endpoint.base_url,), model="m", retry=NO_RETRIES, response_store=store, **settings)


def ask(driver: Driver, requests: list[ChatRequest]) -> list[Outcome]:
    """The outcome of each request, in order, as the DoFn asks them: the store first, the rest from the server."""
    builder = BodyBuilder(driver.config)
    prepared = [builder.prepare(request) for request in requests]
    assert all(isinstance(p, PreparedRequest) for p in prepared)
    ready = [p for p in prepared if isinstance(p, PreparedRequest)]
    found = driver.find_answers(ready)
    outcomes: dict[int, Outcome] = {i: answer for i, answer in enumerate(found) if answer is not None}
    channel = driver.channel()
    channel.submit([(i, p) for i, p in enumerate(ready) if found[i] is None])
    while channel.pending:
        outcomes.update(channel.wait(for_room=False))
    return [outcomes[i] for i in range(len(requests))]


def run(config: ChatConfig, *texts: str) -> list[Outcome]:
    driver = Driver(config)
    try:
        return ask(driver, [ChatRequest(f"id {text}", {"messages": text}, context=text) for text in texts])
    finally:
        driver.close()


def test_a_second_run_sends_nothing_and_gives_the_same_answers(endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    settings = config(endpoint, f"sqlite:///{tmp_path}/a.db")
    first = run(settings, *(f"row {i}" for i in range(200)))
    second = run(settings, *(f"row {i}" for i in range(200)))
    assert len(endpoint.requests) == 200
    assert all(isinstance(o, Completion) and o.source == "store" and o.attempts == 0 for o in second)
    assert [o.body for o in first] == [o.body for o in second]
    assert [o.context for o in second] == [f"row {i}" for i in range(200)]


@pytest.mark.parametrize("text", ["cut off", "null answer", "bad row"])
def test_only_finished_answers_are_served_again(endpoint: ScriptedEndpoint, tmp_path: Path, text: str) -> None:
    """C50, C51: failures, cut-off and empty answers are asked again."""
    settings = config(endpoint, f"sqlite:///{tmp_path}/a.db")
    run(settings, text)
    run(settings, text)
    assert len(endpoint.requests) == 2


def test_which_finish_reasons_count_is_a_setting(endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    settings = config(endpoint, f"sqlite:///{tmp_path}/a.db", stored_finish_reasons=("stop", "length"))
    run(settings, "cut off")
    run(settings, "cut off")
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"store_namespace": "other"},
        {"system_prompt": "Be brief."},
    ],
    ids=str,
)
def test_another_question_is_asked_anew(endpoint: ScriptedEndpoint, tmp_path: Path, change: dict[str, Any]) -> None:
    """C53, C54."""
    store = f"sqlite:///{tmp_path}/a.db"
    run(config(endpoint, store), "row")
    run(ChatConfig(**{"base_urls": (endpoint.base_url,), "model": "m", "response_store": store, **change}), "row")
    assert len(endpoint.requests) == 2


def test_another_replica_is_served_from_the_same_store(endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/a.db"
    run(config(endpoint, store), "row")
    with ScriptedEndpoint(by_text) as replica:
        outcome = run(config(replica, store), "row")[0]
        assert replica.requests == []
    assert isinstance(outcome, Completion)
    assert outcome.endpoint == endpoint.base_url


def test_equal_rows_of_one_batch_keep_their_own_context_and_origin(endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    settings = config(endpoint, f"sqlite:///{tmp_path}/a.db")
    twins = [ChatRequest("same", {"messages": "row"}, context=i, origin=Origin("f", i)) for i in range(3)]
    driver = Driver(settings)
    ask(driver, twins)
    outcomes = ask(driver, twins)
    driver.close()
    assert [(o.context, o.origin) for o in outcomes] == [(i, Origin("f", i)) for i in range(3)]


def test_an_answer_is_committed_before_it_is_emitted(endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    driver = Driver(config(endpoint, f"sqlite:///{tmp_path}/a.db"))
    builder = BodyBuilder(driver.config)
    channel = driver.channel()
    prepared = [builder.prepare(ChatRequest(str(i), {"messages": str(i)})) for i in range(50)]
    channel.submit([(p.key, p) for p in prepared if isinstance(p, PreparedRequest)])
    with sqlite3.connect(f"{tmp_path}/a.db") as reader:
        while channel.pending:
            for key, _ in channel.wait(for_room=False):
                assert reader.execute("SELECT count(*) FROM responses WHERE key = ?", (key,)).fetchone() == (1,)
    reader.close()
    driver.close()


def test_a_store_that_breaks_during_the_run_costs_no_row(endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    driver = Driver(config(endpoint, f"sqlite:///{tmp_path}/a.db"))
    before = ask(driver, [ChatRequest("a", {"messages": "a"})])[0]
    with sqlite3.connect(f"{tmp_path}/a.db") as vandal:
        vandal.execute("DROP TABLE responses")
    vandal.close()
    after = ask(driver, [ChatRequest(str(i), {"messages": f"row {i}"}) for i in range(20)])
    driver.close()
    assert isinstance(before, Completion)
    assert not before.not_stored
    assert all(isinstance(o, Completion) and o.not_stored for o in after)


def test_a_damaged_value_is_asked_again(endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    """C49."""
    settings = config(endpoint, f"sqlite:///{tmp_path}/a.db")
    run(settings, "row")
    with sqlite3.connect(f"{tmp_path}/a.db") as vandal:
        vandal.execute("UPDATE responses SET value = ?", (b'{"body": {"cho',))
    vandal.close()
    outcome = run(settings, "row")[0]
    assert isinstance(outcome, Completion)
    assert (outcome.source, len(endpoint.requests)) == ("server", 2)


def test_a_store_that_cannot_be_opened_is_an_error_before_any_request(
    endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    (tmp_path / "a.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match=r"a\.db"):
        Driver(config(endpoint, f"sqlite:///{tmp_path}/a.db"))
    assert endpoint.requests == []


@pytest.mark.parametrize("url", ["mysql://h/db", "responses.db", "redis://:pw@h/0", "redis://me:pw@h/0"])
def test_a_url_of_no_store_or_with_a_password_is_refused(endpoint: ScriptedEndpoint, url: str) -> None:
    with pytest.raises(ConfigError, match="response_store") as refused:
        config(endpoint, url)
    assert "pw" not in str(refused.value)


def test_a_failed_request_is_no_answer(endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    outcome = run(config(endpoint, f"sqlite:///{tmp_path}/a.db"), "bad row")[0]
    assert isinstance(outcome, FailedRequest)


@pytest.mark.parametrize(
    ("choices", "finished"),
    [
        ([{"finish_reason": "stop", "message": {"content": "a"}}], True),
        ([{"finish_reason": "tool_calls", "message": {"content": None, "tool_calls": [{"id": "t"}]}}], True),
        ([{"finish_reason": "stop", "message": {"content": "a"}}, {"finish_reason": "length", "message": {}}], False),
        ([{"finish_reason": None, "message": {"content": "a"}}], False),
        ([{"finish_reason": "content_filter", "message": {"content": "a"}}], False),
        ([], False),
        (None, False),
    ],
)
def test_what_counts_as_finished(choices: Any, finished: bool) -> None:
    assert is_finished(Completion("a", {"choices": choices}), ("stop", "tool_calls")) is finished
