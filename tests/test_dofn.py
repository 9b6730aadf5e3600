"""ChatCompletionDoFn by itself: life cycle, replayed bundles, memory, composing by hand, what is pickled."""

from __future__ import annotations

import ast
import asyncio
import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from aiohttp import web
from apache_beam.internal import pickler
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import FixedWindows, GlobalWindows, IntervalWindow
from apache_beam.utils.windowed_value import WindowedValue

from beam_llm import (
    ChatCompletion,
    ChatCompletionDoFn,
    ChatConfig,
    ChatRequest,
    Completion,
    EncodeImages,
    ErrorKind,
    FailedRequest,
    RunStoppedError,
)
from beam_llm.dofn import FAILED_TAG, Windowed
from beam_llm.process_drivers import acquire_driver, release_driver
from tests.endpoint import ScriptedEndpoint, answer, echo, last_text
from tests.pipelines import ROOT, FailOnce, Gathered, ask, config, local, refuse, stream, timed

NOW = GlobalWindows.windowed_value(None, timestamp=7)


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(echo) as running:
        yield running


@contextmanager
def set_up(settings: ChatConfig) -> Iterator[ChatCompletionDoFn]:
    dofn = ChatCompletionDoFn(settings)
    dofn.setup()
    try:
        yield dofn
    finally:
        dofn.teardown()


def asked(*texts: str) -> list[ChatRequest]:
    return [ask(text) for text in texts]


def answers(emitted: list[Any]) -> list[str]:
    return sorted(out.value.answer for out in emitted)


def wait_until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("did not come true within 5 s")


# One bundle


def test_process_returns_while_its_batch_is_open_and_finish_bundle_waits_for_it() -> None:
    released = asyncio.Event()

    async def hold(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if last_text(body) == "last":
            released.set()
        await released.wait()
        return answer(last_text(body))

    with ScriptedEndpoint(hold) as running, set_up(config(running)) as dofn:
        dofn.start_bundle()
        assert list(dofn.process(asked("a", "b"), NOW)) == []
        early = list(dofn.process(asked("last"), NOW))
        late = list(dofn.finish_bundle())
    assert answers(early + late) == ["a", "b", "last"]
    assert "last" in answers(late)


def test_an_outcome_leaves_with_the_windowed_value_of_its_own_element() -> None:
    async def judge(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return refuse(400, "no") if last_text(body) == "bad" else answer(last_text(body))

    early = WindowedValue(None, 3, (IntervalWindow(0, 10),))
    with ScriptedEndpoint(judge) as running, set_up(config(running)) as dofn:
        dofn.start_bundle()
        batch = [Windowed(ask("good"), early), Windowed(ask("bad"), early), ask("plain")]
        emitted = [*dofn.process(batch, NOW), *dofn.finish_bundle()]
    tagged = [out for out in emitted if isinstance(out, TaggedOutput)]
    plain = {out.value.answer: out for out in emitted if not isinstance(out, TaggedOutput)}
    assert [(out.tag, out.value.value.kind, out.value.timestamp) for out in tagged] == [
        (FAILED_TAG, ErrorKind.INVALID_REQUEST, early.timestamp)
    ]
    assert plain["good"].windows == early.windows
    assert (plain["plain"].timestamp, plain["plain"].windows) == (NOW.timestamp, NOW.windows)


def test_nothing_is_emitted_from_process_while_the_current_element_is_in_several_windows(
    endpoint: ScriptedEndpoint,
) -> None:
    """Beam would repeat the windows of what is emitted then, once for each window of the current element."""
    double = WindowedValue(None, 3, (IntervalWindow(0, 10), IntervalWindow(5, 15)))
    with set_up(config(endpoint, max_in_flight=1, batch_size=1)) as dofn:
        dofn.start_bundle()
        early = [out for i in range(20) for out in dofn.process([Windowed(ask(str(i)), double)], double)]
        late = list(dofn.finish_bundle())
    assert early == []
    assert answers(late) == sorted(str(i) for i in range(20))
    assert {out.windows for out in late} == {double.windows}


def test_a_large_bundle_is_read_only_as_fast_as_it_is_answered(endpoint: ScriptedEndpoint) -> None:
    """C71: 50,000 rows, 100 in flight; no more of them are read than answers and limits allow."""
    settings = config(endpoint, max_in_flight=100)
    driver = acquire_driver(settings)
    rows = (ask(str(i)) for i in range(50_000))
    read, live, out = 0, 0, 0
    with set_up(settings) as dofn:
        dofn.start_bundle()
        while out < 2000:
            batch = [next(rows) for _ in range(settings.batch_size)]
            read += len(batch)
            for _ in dofn.process(batch, NOW):
                out += 1
                live = max(live, len(driver._tasks))
                assert read - out <= 100 + 3 * settings.batch_size
    release_driver(driver)
    assert 0 < live <= 200  # a task that has its answer gives its slot back a moment before it ends
    assert endpoint.peak <= 100


def test_the_first_answer_of_a_pipeline_is_out_before_the_last_row_is_read(endpoint: ScriptedEndpoint) -> None:
    """C71, through Beam: what stands before and after the step runs in the same breath."""
    read, done = Gathered(), Gathered()
    seen: list[int] = []

    async def note(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(len(read.windowed) - len(done.windowed))
        return answer()

    with ScriptedEndpoint(note) as running, beam.Pipeline(options=local()) as pipeline:
        rows = pipeline | beam.Create([str(i) for i in range(2000)], reshuffle=False)
        _ = rows | "Read" >> beam.ParDo(read)
        results = rows | ChatCompletion(config(running, max_in_flight=50, batch_size=16), ask)
        _ = results.completed | "Done" >> beam.ParDo(done)
    assert len(done.windowed) == 2000
    assert max(seen) <= 50 + 3 * 16


# Bundles that fail


def test_what_a_failed_bundle_left_never_appears_in_the_next() -> None:
    """C62, by hand: no finish_bundle, then start_bundle again on the same instance."""
    released = threading.Event()

    async def hold_old(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if last_text(body).startswith("slow"):
            await asyncio.to_thread(released.wait)
        return answer(last_text(body))

    with ScriptedEndpoint(hold_old) as running, set_up(config(running, max_in_flight=8)) as dofn:
        dofn.start_bundle()
        list(dofn.process(asked("old 1", "old 2", "slow 1", "slow 2"), NOW))
        wait_until(lambda: running.open == 2 and len(running.requests) == 4)
        dofn.start_bundle()
        emitted = list(dofn.process(asked(*(f"new {i}" for i in range(20))), NOW))
        released.set()
        emitted += dofn.finish_bundle()
        dofn.start_bundle()
        again = [*dofn.process(asked("old 1", "slow 1"), NOW), *dofn.finish_bundle()]
    assert answers(emitted) == sorted(f"new {i}" for i in range(20))
    assert answers(again) == ["old 1", "slow 1"]


def test_a_replayed_bundle_asks_only_what_the_store_does_not_have(endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    """C62, with a response store: the first try emitted everything, then the step below raised."""
    settings = config(endpoint, response_store=f"sqlite:///{tmp_path}/answers.db")
    texts = [str(i) for i in range(100)]
    with set_up(settings) as dofn:
        dofn.start_bundle()
        first = [*dofn.process(asked(*texts[:90]), NOW), *dofn.finish_bundle()]
        dofn.start_bundle()
        again = [*dofn.process(asked(*texts), NOW), *dofn.finish_bundle()]
    assert (answers(first), answers(again)) == (sorted(texts[:90]), sorted(texts))
    assert Counter(last_text(body) for body in endpoint.requests) == Counter(texts)
    assert Counter(out.value.source for out in again) == {"store": 90, "server": 10}


def test_results_already_taken_when_the_step_below_raised_are_gone_with_their_bundle(
    endpoint: ScriptedEndpoint,
) -> None:
    with set_up(config(endpoint)) as dofn:
        dofn.start_bundle()
        list(dofn.process(asked("old 1", "old 2", "old 3"), NOW))
        draining: Any = dofn.finish_bundle()
        assert isinstance(next(draining).value, Completion)
        draining.close()  # as Beam does with the generator when a consumer raises
        dofn.start_bundle()
        emitted = [*dofn.process(asked("new"), NOW), *dofn.finish_bundle()]
        dofn.start_bundle()
        assert list(dofn.finish_bundle()) == []
    assert answers(emitted) == ["new"]


@pytest.mark.parametrize("replayed", [True, False])
def test_what_a_failed_bundle_left_open_is_cut_off(replayed: bool) -> None:
    """By a replay on the same instance, or by its teardown while others still use the driver: what nobody waits for
    any more must neither hold slots nor go on being paid for."""

    async def hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if last_text(body).startswith("old"):
            await asyncio.sleep(60)
        return answer(last_text(body))

    with ScriptedEndpoint(hang) as running:
        settings = config(running, max_in_flight=2)
        with set_up(settings) as other, set_up(settings) as failing:
            failing.start_bundle()
            assert list(failing.process(asked("old 1", "old 2", "old 3"), NOW)) == []
            wait_until(lambda: running.open == 2)
            next_one = failing if replayed else other
            if not replayed:
                failing.teardown()
            next_one.start_bundle()
            emitted = [*next_one.process(asked("new"), NOW), *next_one.finish_bundle()]
    assert answers(emitted) == ["new"]
    assert len(running.requests) == 3


def test_what_a_failed_bundle_held_back_is_dropped(endpoint: ScriptedEndpoint) -> None:
    """Outcomes of elements in several windows wait for the end of their bundle; of another bundle, for ever."""
    double = WindowedValue(None, 3, (IntervalWindow(0, 10), IntervalWindow(5, 15)))
    old = FailedRequest("old", ErrorKind.BAD_INPUT, "line 3 is no JSON")
    with set_up(config(endpoint)) as dofn:
        dofn.start_bundle()
        assert list(dofn.process([Windowed(old, double)], double)) == []
        dofn.start_bundle()
        assert list(dofn.finish_bundle()) == []


def test_instances_of_one_process_get_their_own_answers_back(endpoint: ScriptedEndpoint) -> None:
    settings = config(endpoint, max_in_flight=5)
    emitted: dict[int, list[Any]] = {}

    def bundle(number: int) -> None:
        with set_up(settings) as dofn:
            for round_ in range(3):
                dofn.start_bundle()
                texts = [f"{number}-{round_}-{i}" for i in range(20)]
                out = [*dofn.process(asked(*texts[:10]), NOW), *dofn.process(asked(*texts[10:]), NOW)]
                emitted[10 * number + round_] = [*out, *dofn.finish_bundle()]

    threads = [threading.Thread(target=bundle, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {key: answers(out) for key, out in emitted.items()} == {
        10 * n + r: sorted(f"{n}-{r}-{i}" for i in range(20)) for n in range(5) for r in range(3)
    }
    assert endpoint.peak <= 5


class FailsInItsFirstBundle(ChatCompletionDoFn):
    """Raises once, when two batches have been handed over."""

    raised = threading.Event()
    batches = 0

    def process(self, batch: list[Any], wv: Any = beam.DoFn.WindowedValueParam) -> Iterator[Any]:
        yield from super().process(batch, wv)
        self.batches += 1
        if self.batches == 2 and not self.raised.is_set():
            self.raised.set()
            raise OSError("disk full")


def test_a_runner_that_replays_a_bundle_gets_each_answer_once(endpoint: ScriptedEndpoint) -> None:
    """C62: Beam's streaming runner tries a bundle again. Rows may be asked again, but come out once."""
    FailsInItsFirstBundle.raised.clear()
    texts = [f"row@{i}" for i in range(100)]
    done = Gathered()
    with beam.Pipeline(options=local(1, "--streaming")) as pipeline:
        batches = pipeline | stream(texts) | beam.Map(ask) | beam.BatchElements(min_batch_size=10, max_batch_size=10)
        sent = batches | beam.ParDo(FailsInItsFirstBundle(config(endpoint))).with_outputs(FAILED_TAG, main="completed")
        _ = sent.completed | beam.ParDo(done)
    assert FailsInItsFirstBundle.raised.is_set()
    assert sorted(c.answer for c in done.values) == sorted(texts)
    assert all(count <= 2 for count in Counter(last_text(body) for body in endpoint.requests).values())


def test_a_replay_below_costs_nothing_where_the_runner_keeps_what_we_emitted(endpoint: ScriptedEndpoint) -> None:
    """C62: the step after ours raises once in the middle of its bundle."""
    texts = [f"row@{i}" for i in range(100)]
    done = Gathered()
    with beam.Pipeline(options=local(1, "--streaming")) as pipeline:
        results = pipeline | stream(texts) | ChatCompletion(config(endpoint), ask)
        _ = results.completed | beam.ParDo(FailOnce("replay below", at=50)) | beam.ParDo(done)
    assert sorted(c.answer for c in done.values) == sorted(texts)
    assert Counter(last_text(body) for body in endpoint.requests) == Counter(texts)


def test_a_doomed_run_raises_instead_of_waiting() -> None:
    async def refuse_key(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return refuse(401, "Incorrect API key provided")

    with ScriptedEndpoint(refuse_key) as running, set_up(config(running)) as dofn:
        dofn.start_bundle()
        list(dofn.process(asked(*map(str, range(64))), NOW))
        with pytest.raises(RunStoppedError, match="Incorrect API key provided"):
            list(dofn.finish_bundle())


def test_teardown_without_an_end_of_the_bundle_and_twice_is_harmless(endpoint: ScriptedEndpoint) -> None:
    dofn = ChatCompletionDoFn(config(endpoint))
    dofn.setup()
    dofn.start_bundle()
    list(dofn.process(asked("a"), NOW))
    dofn.teardown()
    dofn.teardown()
    dofn.setup()
    dofn.start_bundle()
    assert answers([*dofn.process(asked("b"), NOW), *dofn.finish_bundle()]) == ["b"]
    dofn.teardown()


# Composing by hand


@pytest.mark.parametrize("encoded", [True, False])
def test_the_steps_can_be_composed_by_hand(endpoint: ScriptedEndpoint, encoded: bool) -> None:
    """With pictures encoded in a step of their own, or left to the DoFn."""
    settings = config(endpoint)
    picture = ROOT / "tests" / "no-such-picture.png"
    requests = [*asked("a", "b"), ChatRequest("c", {"messages": [{"type": "image", "value": str(picture)}]})]
    done, failed = Gathered(), Gathered()
    with beam.Pipeline(options=local()) as pipeline:
        batches: Any = pipeline | beam.Create(requests) | beam.BatchElements(min_batch_size=2, max_batch_size=2)
        if encoded:
            batches = batches | beam.Map(EncodeImages(settings))
        outputs = batches | beam.ParDo(ChatCompletionDoFn(settings)).with_outputs(FAILED_TAG, main="completed")
        _ = outputs.completed | "Completed" >> beam.ParDo(done)
        _ = outputs[FAILED_TAG] | "Failed" >> beam.ParDo(failed)
    assert sorted(c.answer for c in done.values) == ["a", "b"]
    assert [(f.custom_id, f.kind) for f in failed.values] == [("c", ErrorKind.BAD_IMAGE)]


def test_batches_made_by_hand_keep_their_window(endpoint: ScriptedEndpoint) -> None:
    settings = config(endpoint)
    done = Gathered()
    with beam.Pipeline(options=local()) as pipeline:
        windowed = pipeline | timed(["a@1", "b@2", "c@13"]) | beam.WindowInto(FixedWindows(10)) | beam.Map(ask)
        batches = windowed | beam.BatchElements(min_batch_size=8, max_batch_size=8)
        outputs = batches | beam.ParDo(ChatCompletionDoFn(settings)).with_outputs(FAILED_TAG, main="completed")
        _ = outputs.completed | beam.ParDo(done)
    assert {wv.value.answer: wv.windows[0].start for wv in done.windowed} == {"a@1": 0, "b@2": 0, "c@13": 10}


# What is pickled

KEY = "sk-test-0123456789abcdef"


def test_what_travels_to_workers_pickles_and_holds_no_key(
    endpoint: ScriptedEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    settings = config(endpoint)
    pipeline = beam.Pipeline(options=local())
    _ = pipeline | beam.Create(["a"]) | ChatCompletion(settings, ask)
    shipped = [
        pickle.dumps(settings),
        pickler.dumps(settings),
        pickler.dumps(ChatCompletion(settings, ask)),
        pickler.dumps(ChatCompletionDoFn(settings)),
        pickler.dumps(EncodeImages(settings)),
        pipeline.to_runner_api().SerializeToString(),
        str(pipeline.options.get_all_options()).encode(),
    ]
    assert pickler.loads(shipped[1]) == settings
    assert all(KEY.encode() not in data and KEY.encode("utf-16-le") not in data for data in shipped)
    pipeline.run().wait_until_finish()
    assert [headers["Authorization"] for headers in endpoint.headers] == [f"Bearer {KEY}"]


# What of Beam is used

PRIVATE = {
    ("images/storage.py", "_credentials"): "Google's client, which has no other way to the credentials that it found",
    ("images/storage.py", "_pipeline_options"): "GcsIO wants the options that Beam's own file system was made with",
}
"""Private names of other packages that modules next to Beam read, and why."""


DOCUMENTED = ("_asdict", "_fields", "_replace", "_exit")
"""Of NamedTuple and os: public, in spite of their underscore."""


def private_names(path: Path) -> Iterator[str]:
    """Underscored names that a file imports from Beam, or reads from an object that is neither `self` nor `cls`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            home = [getattr(node, "module", None) or ""]
            names = [".".join([*home, alias.name]).lstrip(".") for alias in node.names]
            words = [word for name in names if name.startswith("apache_beam") for word in name.split(".")]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            words = [node.attr]
        else:
            continue
        yield from (
            word for word in words if word.startswith("_") and not word.endswith("__") and word not in DOCUMENTED
        )


def test_nothing_private_of_beam_is_used_but_what_is_listed_with_a_reason() -> None:
    package = ROOT / "beam_llm"
    beside_beam = [path for path in package.rglob("*.py") if "apache_beam" in path.read_text(encoding="utf-8")]
    found = {(path.relative_to(package).as_posix(), name) for path in beside_beam for name in private_names(path)}
    assert found == set(PRIVATE)
    assert len(beside_beam) >= 8
