"""ChatCompletion in pipelines: windows, runners, worker processes, counters, with a real endpoint on loopback."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
import pytest
from aiohttp import web
from apache_beam.transforms.window import FixedWindows, Sessions, SlidingWindows
from apache_beam.utils.windowed_value import PaneInfoTiming

from beam_llm import ChatCompletion, ChatRequest, Completion, ErrorKind, FailedRequest, RunStoppedError
from tests.endpoint import ScriptedEndpoint, answer, echo, last_text
from tests.pipelines import (
    ROOT,
    Gathered,
    ask,
    ask_row,
    ask_with_pid,
    bounds,
    config,
    counters,
    local,
    refuse,
    stream,
    timed,
)


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(echo) as running:
        yield running


# Windows, timestamps, panes


def test_each_answer_keeps_its_own_timestamp_and_fixed_window(endpoint: ScriptedEndpoint) -> None:
    """C65."""
    texts = [f"row@{second}" for second in range(30)]
    done = Gathered()
    with beam.Pipeline(options=local()) as pipeline:
        windowed = pipeline | timed(texts) | beam.WindowInto(FixedWindows(10))
        results = windowed | ChatCompletion(config(endpoint), ask)
        _ = results.completed | beam.ParDo(done)
    assert {wv.value.answer: (float(wv.timestamp), bounds(wv)) for wv in done.windowed} == {
        f"row@{second}": (second, [(second // 10 * 10, second // 10 * 10 + 10)]) for second in range(30)
    }
    assert len(done.windowed) == 30


def test_failures_keep_their_timestamp_and_window_too() -> None:
    async def refuse_odd(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        odd = int(last_text(body).partition("@")[2]) % 2
        return refuse(400, "no odd rows") if odd else answer()

    failed = Gathered()
    with ScriptedEndpoint(refuse_odd) as running, beam.Pipeline(options=local()) as pipeline:
        windowed = pipeline | timed(["a@1", "b@2", "c@13", "d@24"]) | beam.WindowInto(FixedWindows(10))
        _ = (windowed | ChatCompletion(config(running), ask)).failed | beam.ParDo(failed)
    assert {wv.value.custom_id: (float(wv.timestamp), bounds(wv)) for wv in failed.windowed} == {
        "a@1": (1, [(0, 10)]),
        "c@13": (13, [(10, 20)]),
    }


def test_an_element_in_several_windows_is_asked_once_and_answered_in_all(endpoint: ScriptedEndpoint) -> None:
    """Sliding windows; `process` of a later element must not multiply the windows of an earlier one's answer."""
    texts = [f"row@{second}" for second in range(20, 60)]
    done, groups = Gathered(), Gathered()
    with beam.Pipeline(options=local()) as pipeline:
        windowed = pipeline | timed(texts) | beam.WindowInto(SlidingWindows(size=20, period=5))
        results = windowed | ChatCompletion(config(endpoint, max_in_flight=4, batch_size=1), ask)
        _ = results.completed | "Look" >> beam.ParDo(done)
        _ = results.completed | beam.Map(lambda c: (0, c.answer)) | beam.GroupByKey() | "Group" >> beam.ParDo(groups)
    assert Counter(last_text(body) for body in endpoint.requests) == Counter(texts)
    expected = {}
    for second in range(20, 60):
        newest = second // 5 * 5
        expected[f"row@{second}"] = (second, [(start, start + 20) for start in range(newest - 15, newest + 1, 5)])
    assert Counter(wv.value.answer for wv in done.windowed) == Counter(texts)
    assert {wv.value.answer: (float(wv.timestamp), bounds(wv)) for wv in done.windowed} == expected
    members = {bounds(wv)[0]: sorted(wv.value[1]) for wv in groups.windowed}
    assert members == {
        window: sorted(text for text, (_, windows) in expected.items() if window in windows)
        for window in {w for _, windows in expected.values() for w in windows}
    }


def test_sessions_downstream_merge_as_if_nothing_stood_between(endpoint: ScriptedEndpoint) -> None:
    groups = Gathered()
    with beam.Pipeline(options=local()) as pipeline:
        windowed = pipeline | timed(["a@0", "b@4", "c@8", "d@30", "e@33"]) | beam.WindowInto(Sessions(5))
        results = windowed | ChatCompletion(config(endpoint), ask)
        _ = results.completed | beam.Map(lambda c: (0, c.answer)) | beam.GroupByKey() | beam.ParDo(groups)
    assert {bounds(wv)[0]: sorted(wv.value[1]) for wv in groups.windowed} == {
        (0, 13): ["a@0", "b@4", "c@8"],
        (30, 38): ["d@30", "e@33"],
    }


def test_the_pane_of_a_grouping_upstream_is_kept(endpoint: ScriptedEndpoint) -> None:
    before, after = Gathered(), Gathered()
    with beam.Pipeline(options=local()) as pipeline:
        grouped = (
            pipeline
            | timed(["a@1", "b@2", "c@13"])
            | beam.WindowInto(FixedWindows(10))
            | beam.Map(lambda text: (text, text))
            | beam.GroupByKey()
            | beam.Map(lambda pair: pair[0])
        )
        _ = grouped | "Before" >> beam.ParDo(before)
        _ = (grouped | ChatCompletion(config(endpoint), ask)).completed | "After" >> beam.ParDo(after)
    panes = {wv.value: wv.pane_info for wv in before.windowed}
    assert all(pane.timing == PaneInfoTiming.ON_TIME for pane in panes.values())
    assert {wv.value.answer: wv.pane_info for wv in after.windowed} == panes


# Runners


def test_a_stream_of_several_bundles_keeps_timestamps_and_nothing_is_held_back(endpoint: ScriptedEndpoint) -> None:
    """C65, unbounded: Beam runs a TestStream on its streaming runner, which hands over bundle by bundle."""
    done, groups = Gathered(), Gathered()
    pipeline = beam.Pipeline(options=local(1, "--streaming"))
    windowed = pipeline | stream(["a@1", "b@4"], ["c@12"], ["d@21", "e@25"]) | beam.WindowInto(FixedWindows(10))
    results = windowed | ChatCompletion(config(endpoint), ask)
    _ = results.completed | "Look" >> beam.ParDo(done)
    _ = results.completed | beam.Map(lambda c: (0, c.answer)) | beam.GroupByKey() | "Group" >> beam.ParDo(groups)
    result = pipeline.run()
    result.wait_until_finish()
    assert type(result).__module__ == "apache_beam.runners.direct.direct_runner"
    assert {wv.value.answer: (float(wv.timestamp), bounds(wv)) for wv in done.windowed} == {
        "a@1": (1, [(0, 10)]),
        "b@4": (4, [(0, 10)]),
        "c@12": (12, [(10, 20)]),
        "d@21": (21, [(20, 30)]),
        "e@25": (25, [(20, 30)]),
    }
    assert {bounds(wv)[0]: sorted(wv.value[1]) for wv in groups.windowed} == {
        (0, 10): ["a@1", "b@4"],
        (10, 20): ["c@12"],
        (20, 30): ["d@21", "e@25"],
    }


def test_answers_of_a_global_window_can_be_windowed_downstream_of_a_stream(endpoint: ScriptedEndpoint) -> None:
    groups = Gathered()
    with beam.Pipeline(options=local(1, "--streaming")) as pipeline:
        results = pipeline | stream(["a@1", "b@4"], ["c@12"], ["d@21"]) | ChatCompletion(config(endpoint), ask)
        keyed = results.completed | beam.Map(lambda c: (0, c.answer)) | beam.WindowInto(FixedWindows(10))
        _ = keyed | beam.GroupByKey() | beam.ParDo(groups)
    assert {bounds(wv)[0]: sorted(wv.value[1]) for wv in groups.windowed} == {
        (0, 10): ["a@1", "b@4"],
        (10, 20): ["c@12"],
        (20, 30): ["d@21"],
    }


def test_direct_runner_is_the_fn_api_runner_and_nothing_else_is_tried_first(
    endpoint: ScriptedEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """Beam would try Prism, download it for that, and say so at INFO only."""
    pipeline = beam.Pipeline(options=local())
    _ = pipeline | beam.Create(["a"]) | ChatCompletion(config(endpoint), ask)
    with caplog.at_level(logging.INFO):
        result = pipeline.run()
        result.wait_until_finish()
    assert type(result).__module__ == "apache_beam.runners.portability.fn_api_runner.fn_runner"
    assert [record.message for record in caplog.records if "prism" in record.getMessage().lower()] == []


def test_two_workers_are_two_processes_each_with_a_session_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C68."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    users: dict[int, set[str]] = {}

    async def note(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        users.setdefault(request.transport.get_extra_info("peername")[1], set()).add(body["user"])
        return answer()

    with ScriptedEndpoint(note) as running:
        pipeline = beam.Pipeline(options=local(2))
        results = pipeline | beam.Create([str(i) for i in range(200)]) | ChatCompletion(config(running), ask_with_pid)
        _ = results.completed | beam.Map(lambda c: c.custom_id)
        result = pipeline.run()
        result.wait_until_finish()
    assert type(result).__module__ == "apache_beam.runners.portability.fn_api_runner.fn_runner"
    assert all(len(pids) == 1 for pids in users.values()), "one connection carried requests of two processes"
    assert len(set().union(*users.values())) == 2
    assert len(running.requests) == 200
    assert counters(result)["completed"] == 200


# Composing


def test_a_users_own_record_comes_back_as_the_context(endpoint: ScriptedEndpoint) -> None:
    rows = [{"custom_id": str(i), "body": {"messages": f"q{i}"}, "label": i * i} for i in range(5)]
    done = Gathered()
    with beam.Pipeline(options=local()) as pipeline:
        results = pipeline | beam.Create(rows) | ChatCompletion(config(endpoint), ask_row)
        _ = results.completed | beam.ParDo(done)
    assert sorted((c.context["label"], c.answer) for c in done.values) == [(i * i, f"q{i}") for i in range(5)]
    assert all("label" not in body for body in endpoint.requests)


def test_a_row_of_which_to_request_makes_no_request_is_one_failed_request(endpoint: ScriptedEndpoint) -> None:
    rows = [
        {"custom_id": "good", "body": {"messages": "hi"}},
        {"custom_id": "raises"},
        {"custom_id": "skipped", "body": "skip"},
        {"custom_id": "no object", "body": ["messages"]},
    ]
    done, failed = Gathered(), Gathered()
    with beam.Pipeline(options=local()) as pipeline:
        results = pipeline | beam.Create(rows) | ChatCompletion(config(endpoint), ask_row)
        _ = results.completed | "Completed" >> beam.ParDo(done)
        _ = results.failed | "Failed" >> beam.ParDo(failed)
    assert [c.custom_id for c in done.values] == ["good"]
    assert sorted((f.custom_id, f.kind, f.message) for f in failed.values) == [
        ("no object", ErrorKind.BAD_INPUT, "body: expected an object, got list"),
        ("raises", ErrorKind.BAD_INPUT, "to_request raised KeyError: 'body'"),
        ("skipped", ErrorKind.BAD_INPUT, "to_request returned NoneType instead of a ChatRequest"),
    ]
    assert sorted(f.context["custom_id"] for f in failed.values) == ["no object", "raises", "skipped"]


def test_elements_of_another_type_end_the_run_and_the_message_names_the_way_out(endpoint: ScriptedEndpoint) -> None:
    pipeline = beam.Pipeline(options=local())
    _ = pipeline | beam.Create([{"prompt": "hi"}]) | ChatCompletion(config(endpoint))
    with pytest.raises(TypeError, match="ChatCompletion takes ChatRequest, got dict: pass to_request="):
        pipeline.run().wait_until_finish()
    assert endpoint.requests == []


@pytest.mark.parametrize("to_request", [None, ask])
def test_failures_from_upstream_go_straight_to_failed(endpoint: ScriptedEndpoint, to_request: Any) -> None:
    upstream = FailedRequest("x", ErrorKind.BAD_INPUT, "line 3 is no JSON")
    done, failed = Gathered(), Gathered()
    with beam.Pipeline(options=local()) as pipeline:
        good = "hi" if to_request else ChatRequest("good", {"messages": "hi"})
        results = pipeline | beam.Create([upstream, good]) | ChatCompletion(config(endpoint), to_request)
        _ = results.completed | "Completed" >> beam.ParDo(done)
        _ = results.failed | "Failed" >> beam.ParDo(failed)
    assert failed.values == [upstream]
    assert [c.answer for c in done.values] == ["hi"]


def ask_on(completion: Completion) -> ChatRequest:
    return ask(f"{completion.answer}!")


@pytest.mark.parametrize("shuffled", [False, True])
def test_steps_with_the_same_config_share_one_session(
    endpoint: ScriptedEndpoint, caplog: pytest.LogCaptureFixture, shuffled: bool
) -> None:
    """C39: three steps, fused or in stages of their own, each fed by the one before; max_in_flight holds for all."""
    settings = config(endpoint, max_in_flight=8)
    done = Gathered()
    with caplog.at_level(logging.INFO, "beam_llm.driver"), beam.Pipeline(options=local()) as pipeline:
        asked: Any = pipeline | beam.Create([str(i) for i in range(40)])
        steps: list[Callable[[Any], ChatRequest]] = [ask, ask_on, ask_on]
        for step, to_request in enumerate(steps):
            asked = (asked | f"Ask{step}" >> ChatCompletion(settings, to_request)).completed
            if shuffled:
                asked |= f"Shuffle{step}" >> beam.Reshuffle()
        _ = asked | beam.ParDo(done)
    assert sorted(c.answer for c in done.values) == sorted(f"{i}!!" for i in range(40))
    assert [record.name for record in caplog.records].count("beam_llm.driver") == 1
    assert endpoint.peak <= 8


# The books


def test_five_bad_rows_in_five_ways_are_five_failures_and_all_else_is_delivered() -> None:
    """C61."""
    rows: list[dict[str, Any]] = [{"custom_id": str(i), "body": {"messages": f"q{i}"}} for i in range(2000)]
    picture = {"type": "image_url", "image_url": {"url": str(ROOT / "no-such-picture.png")}}
    rows[3] = {"custom_id": "no messages", "body": {}}
    rows[500] = {"custom_id": "messages not a list", "body": {"messages": 42}}
    rows[501] = {"custom_id": "no picture", "body": {"messages": [{"role": "user", "content": [picture]}]}}
    rows[1200] = {"custom_id": "refused", "body": {"messages": "too hot"}}
    rows[1999] = {"custom_id": "raises"}

    async def judge(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return refuse(400, "too hot") if last_text(body) == "too hot" else answer(last_text(body))

    done, failed = Gathered(), Gathered()
    with ScriptedEndpoint(judge) as running, beam.Pipeline(options=local()) as pipeline:
        results = pipeline | beam.Create(rows) | ChatCompletion(config(running), ask_row)
        _ = results.completed | "Completed" >> beam.ParDo(done)
        _ = results.failed | "Failed" >> beam.ParDo(failed)
    reasons = {f.custom_id: (f.kind, f.message) for f in failed.values}
    assert {custom_id: kind for custom_id, (kind, _) in reasons.items()} == {
        "no messages": ErrorKind.BAD_INPUT,
        "messages not a list": ErrorKind.BAD_INPUT,
        "no picture": ErrorKind.BAD_IMAGE,
        "refused": ErrorKind.INVALID_REQUEST,
        "raises": ErrorKind.BAD_INPUT,
    }
    assert len({message for _, message in reasons.values()}) == 5
    assert len(failed.values) == 5
    left = [i for i in range(2000) if i not in (3, 500, 501, 1200, 1999)]
    assert sorted((int(c.custom_id), c.answer) for c in done.values) == [(i, f"q{i}") for i in left]


def test_counters_tell_every_request_that_was_sent_not_only_those_that_brought_an_answer() -> None:
    """C89: each row fails twice with 500, then succeeds."""
    tries: Counter[str] = Counter()

    async def third_time_lucky(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = last_text(body)
        tries[text] += 1
        return refuse(500, "not yet") if tries[text] < 3 else answer(finish_reason="length" if text < "10" else "stop")

    with ScriptedEndpoint(third_time_lucky) as running:
        pipeline = beam.Pipeline(options=local())
        _ = pipeline | beam.Create([f"{i:02}" for i in range(50)]) | ChatCompletion(config(running), ask)
        result = pipeline.run()
        result.wait_until_finish()
        sent = len(running.requests)
    found = counters(result)
    assert sent == 150
    assert found.pop("request_bytes") > 150 * len('{"model":"m"}')
    assert found.pop(f"answered_by_{running.base_url}") == 50
    assert found.pop(f"requests_failed_at_{running.base_url}") == 100
    assert found == {
        "requests_sent": 150,
        "retries": 100,
        "retries_server_error": 100,
        "completed": 50,
        "finish_length": 10,
        "finish_stop": 40,
        "prompt_tokens": 150,
        "completion_tokens": 100,
    }


def test_counters_split_failures_by_kind() -> None:
    async def judge(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        status = int(last_text(body))
        return refuse(status, "no") if status >= 400 else answer()

    texts = ["200"] * 6 + ["400"] * 3 + ["503"] * 2
    with ScriptedEndpoint(judge) as running:
        pipeline = beam.Pipeline(options=local())
        requests = [*texts, FailedRequest("x", ErrorKind.BAD_INPUT, "no JSON")]
        _ = pipeline | beam.Create(requests) | ChatCompletion(config(running), ask)
        result = pipeline.run()
        result.wait_until_finish()
    found = counters(result)
    kinds = {name: count for name, count in found.items() if name.startswith("failed")}
    assert kinds == {"failed": 6, "failed_invalid_request": 3, "failed_overloaded": 2, "failed_bad_input": 1}
    assert (found["completed"], found["requests_sent"], found["retries"]) == (6, 6 + 3 + 2 * 4, 2 * 3)


# Ends


def test_a_doomed_run_raises_the_servers_reason() -> None:
    async def refuse_key(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return refuse(401, "Incorrect API key provided")

    with ScriptedEndpoint(refuse_key) as running:
        pipeline = beam.Pipeline(options=local())
        _ = pipeline | beam.Create([str(i) for i in range(1000)]) | ChatCompletion(config(running), ask)
        with pytest.raises(RunStoppedError, match="Incorrect API key provided"):
            pipeline.run().wait_until_finish()
    assert len(running.requests) < 60


_RUN = """
import sys
import apache_beam as beam
from beam_llm import ChatCompletion, ChatConfig
from tests.pipelines import FailOnce, ask, local

url, workers, fails_at = sys.argv[1:]
with beam.Pipeline(options=local(int(workers))) as pipeline:
    asked = pipeline | beam.Create([str(i) for i in range(50)]) | ChatCompletion(ChatConfig(url, model="m"), ask)
    _ = asked.completed | beam.ParDo(FailOnce("run", at=int(fails_at)))
"""


@pytest.mark.parametrize(("workers", "fails_at", "code"), [(1, 99, 0), (2, 99, 0), (1, 20, 1)])
def test_a_run_ends_within_seconds_and_leaves_nothing_open(
    endpoint: ScriptedEndpoint, workers: int, fails_at: int, code: int
) -> None:
    """C92: asyncio's debug mode and every warning on, in the workers too; a good end, and one by exception."""
    ended = subprocess.run(
        [sys.executable, "-c", _RUN, endpoint.base_url, str(workers), str(fails_at)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONDEVMODE": "1",
            "PYTHONWARNINGS": "error,ignore::FutureWarning",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, "disk full" in ended.stderr) == (code, bool(code)), ended.stderr[-3000:]
    assert len(endpoint.requests) == 50 or code
    noise = re.compile(r".*(?:Warning|[Uu]nclosed|pending|never awaited|Exception ignored).*")
    assert noise.findall(ended.stderr) == []
