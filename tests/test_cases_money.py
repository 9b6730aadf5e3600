"""What is paid for: the reported cases of retries that multiply, reruns that ask again, answers that get mixed up."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from aiohttp import web
from orjson import loads
from PIL import Image

from beam_llm.config import ChatConfig
from beam_llm.errors import ErrorKind
from beam_llm.io import Format, InputFormat, ReadRequests, WriteResults
from beam_llm.records import ChatRequest
from beam_llm.retry import RetryPolicy
from beam_llm.simulator import Script, SimulatorThread
from beam_llm.transforms import ChatCompletion
from tests.commands import PROC, Command, answer_of, request, run, wait_until, write_lines
from tests.endpoint import ScriptedEndpoint, answer, echo, last_text
from tests.pipelines import config, local
from tests.replies import Replies, Reply, through_beam

BROKEN = Reply(500, {"error": {"message": "broken"}})


def test_a_connection_cut_after_sending_is_paid_for_a_counted_number_of_times() -> None:
    """C21: the server generates each time; the record and the counters say so by a kind of their own."""
    generated = 0

    async def generate_and_cut(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal generated
        generated += 1
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    with ScriptedEndpoint(generate_and_cut) as endpoint:
        four = through_beam(config(endpoint), ["q"])
        one = through_beam(config(endpoint, retry=RetryPolicy(3, max_disconnect_retries=0)), ["q"])
    assert generated == 4 + 1
    assert (four.failed["q"].kind, four.failed["q"].attempts) == (ErrorKind.DISCONNECTED, 4)
    assert (four.counters["requests_sent"], four.counters["retries_disconnected"]) == (4, 3)
    assert one.failed["q"].attempts == 1


def test_retries_do_not_multiply_with_pictures_and_a_store_in_use(tmp_path: Path) -> None:
    """C22: 20 rows, three tries: 60 requests on the server, and `attempts` says 3."""
    Image.new("RGB", (8, 6), "red").save(tmp_path / "red.png")
    parts = [{"type": "image", "value": str(tmp_path / "red.png")}, {"type": "text", "value": "q"}]
    rows = [ChatRequest(str(n), {"messages": parts}) for n in range(20)]
    replies = Replies({"q": [BROKEN]}, always=True)
    with ScriptedEndpoint(replies) as endpoint:
        settings = config(endpoint, retry=RetryPolicy(2, 0.001, 0.002), response_store=f"sqlite:///{tmp_path}/a.db")
        ran = through_beam(settings, rows)
    assert replies.sent == {"q": 60}
    assert {failed.attempts for failed in ran.failed.values()} == {3}
    assert (len(ran.failed), ran.counters["requests_sent"]) == (20, 60)


def run_files(settings: ChatConfig, file: Path, output: Path) -> list[dict[str, Any]]:
    """The records that are in the output folder after a run over a file, each line parsed strictly."""
    with beam.Pipeline(options=local()) as pipeline:
        read = pipeline | ReadRequests([str(file)], InputFormat(Format.OPENAI_BATCH))
        _ = (read | ChatCompletion(settings)) | WriteResults(str(output), Format.OPENAI_BATCH)
    return [loads(line) for shard in output.glob("completed-*") for line in shard.read_bytes().splitlines()]


def test_half_a_line_and_half_an_answer_of_an_interrupted_run_are_made_whole_by_the_next(tmp_path: Path) -> None:
    """C49: the row with half an answer is asked again, the others are not, and no line is glued to half a line."""
    texts = [f"row {n}" for n in range(10)]
    file = write_lines(tmp_path / "in.jsonl", *(request(text, text) for text in texts))
    output = tmp_path / "out"
    with ScriptedEndpoint(echo) as endpoint:
        settings = config(endpoint, response_store=f"sqlite:///{tmp_path}/answers.db")
        run_files(settings, file, output)
        [shard] = output.glob("completed-*")
        whole = shard.read_bytes()
        shard.write_bytes(whole[: whole.rindex(b'"response"')])
        with closing(sqlite3.connect(tmp_path / "answers.db")) as store, store:
            store.execute("UPDATE responses SET value = substr(value, 1, 20) WHERE rowid = 1")
        records = run_files(settings, file, output)
        sent = [last_text(body) for body in endpoint.requests]
    assert sorted(answer_of(record) for record in records) == texts
    assert sorted(record["custom_id"] for record in records) == texts
    assert (len(sent), len(set(sent))) == (11, 10)


def test_another_data_set_with_the_same_ids_gets_answers_of_its_own(tmp_path: Path) -> None:
    """C54: same ids, same store, same output folder, other prompts."""

    def data_set(name: str) -> Path:
        return write_lines(tmp_path / "in.jsonl", *(request(str(n), f"{name} {n}") for n in range(1, 6)))

    with ScriptedEndpoint(echo) as endpoint:
        settings = config(endpoint, response_store=f"sqlite:///{tmp_path}/answers.db")
        run_files(settings, data_set("A"), tmp_path / "out")
        records = run_files(settings, data_set("B"), tmp_path / "out")
        sent = [last_text(body) for body in endpoint.requests]
    assert {record["custom_id"]: answer_of(record) for record in records} == {str(n): f"B {n}" for n in range(1, 6)}
    assert sorted(sent) == sorted(f"{name} {n}" for name in "AB" for n in range(1, 6))


def test_another_picture_behind_the_same_name_is_another_question(tmp_path: Path) -> None:
    """C52: same id and same text; another path, and then the same path with other bytes."""

    async def tell_size(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return answer(str(len(body["messages"][-1]["content"][0]["image_url"]["url"])))

    def ask(*ids: str) -> dict[str, str | None]:
        parts = [[{"type": "image", "value": str(tmp_path / f"{n}.png")}, {"type": "text", "value": "q"}] for n in ids]
        return through_beam(settings, [ChatRequest("same", {"messages": p}) for p in parts]).answers()

    for name, size in (("a", 8), ("b", 80)):
        Image.effect_noise((size, size), 50).convert("RGB").save(tmp_path / f"{name}.png")
    with ScriptedEndpoint(tell_size) as endpoint:
        settings = config(endpoint, response_store=f"sqlite:///{tmp_path}/answers.db")
        answers = [ask("a"), ask("b"), ask("a")]
        assert answers[0] != answers[1]
        assert answers[2] == answers[0]
        assert len(endpoint.requests) == 2
        (tmp_path / "b.png").replace(tmp_path / "a.png")
        assert ask("a") == answers[1]


def test_every_answer_stays_with_its_own_row_through_retries_delays_and_a_store(tmp_path: Path) -> None:
    """C56: 200 rows that are to echo their id; half of them stored, the rest hit by 500s and slow by turns."""
    rng = random.Random(56)

    async def unsteady(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(rng.uniform(0, 0.03))
        return BROKEN.response() if rng.random() < 0.3 else answer(last_text(body))

    texts = [f"row {n}" for n in range(200)]
    with ScriptedEndpoint(unsteady) as endpoint:
        patient = RetryPolicy(30, 0.001, 0.01)
        settings = config(endpoint, retry=patient, response_store=f"sqlite:///{tmp_path}/a.db", max_in_flight=40)
        through_beam(settings, texts[::2])
        ran = through_beam(settings, texts)
    assert ran.answers() == {text: text for text in texts}
    assert {text for text, c in ran.completed.items() if c.source == "store"} == set(texts[::2])
    assert any(c.attempts > 1 for c in ran.completed.values())


def test_failures_are_counted_at_the_endpoint_that_failed_even_where_another_one_answered() -> None:
    replies = Replies({f"row {n}": [BROKEN] for n in range(4)}, always=True)
    with ScriptedEndpoint(replies) as broken, ScriptedEndpoint(echo) as sound:
        settings = config(sound, retry=RetryPolicy(20, 0.001, 0.002))
        settings = replace(settings, base_urls=(broken.base_url, sound.base_url))
        ran = through_beam(settings, [f"row {n}" for n in range(4)])
    assert len(ran.completed) == 4
    assert ran.counters[f"answered_by_{sound.base_url}"] == 4
    assert ran.counters[f"requests_failed_at_{broken.base_url}"] == replies.sent.total() > 0
    assert f"requests_failed_at_{sound.base_url}" not in ran.counters


ROWS, IN_FLIGHT = 1000, 50


@pytest.mark.skipif(not PROC.exists(), reason="the processes of a run are found in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_run_that_was_stopped_goes_on_where_it_was(number: signal.Signals, tmp_path: Path) -> None:
    """C59: counted at the server; at most what was open when the run was stopped is asked twice."""
    rows = write_lines(tmp_path / "in.jsonl", *(request(f"r{n}", f"row {n}") for n in range(ROWS)))
    with SimulatorThread(Script(latency_ms=40)) as simulator:
        flags = (f"--input={rows}", f"--base_url={simulator.base_url}", "--num_workers=1")
        with Command(tmp_path / "out", *flags, f"--max_in_flight={IN_FLIGHT}") as command:
            wait_until(lambda: simulator.stats()["answered"] >= 300, 40, "300 answers")
            command.process.send_signal(number)
            command.wait(20)
        wait_until(lambda: simulator.stats()["open"] == 0, 10, "end of all requests")
        before = simulator.stats()["answered"]
        done = run(tmp_path / "out", *flags, code=0)
        after = simulator.stats()
    assert 300 <= before < ROWS
    assert {record["custom_id"]: answer_of(record) for record in done.completed} == {
        f"r{n}": f"row {n}" for n in range(ROWS)
    }
    assert len(done.completed) == ROWS
    assert after["distinct_answered"] == ROWS
    assert after["answered"] <= ROWS + IN_FLIGHT
    assert done.summary["from_store"] >= before - IN_FLIGHT
