"""How a run of the command line ends: doomed, killed, interrupted, repeated; what it shows, and hides, meanwhile."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from beam_llm.simulator import Script, SimulatorThread, is_doomed
from tests.commands import PROC, Command, Finished, answer_of, ids, request, run, wait_until, write_lines
from tests.endpoint import Handler, ScriptedEndpoint, answer

linux = pytest.mark.skipif(not PROC.exists(), reason="the processes of a run are found in /proc")


def text_rows(path: Path, count: int) -> Path:
    return write_lines(path, *(request(f"r{i}", f"row {i}") for i in range(count)))


def refuse(status: int, error: dict[str, Any]) -> Any:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": error}, status=status)

    return handler


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_rows(tmp_path_factory.mktemp("rows") / "in.jsonl", 10_000)


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [
        (401, {"message": "Incorrect API key provided", "code": "invalid_api_key"}, "Incorrect API key provided"),
        (404, {"message": "The model `m` does not exist", "code": "model_not_found"}, "The model `m` does not exist"),
        (429, {"message": "You exceeded your current quota", "code": "insufficient_quota"}, "your current quota"),
    ],
)
def test_an_endpoint_that_refuses_everything_stops_the_run_after_a_few_requests(
    status: int, error: dict[str, Any], says: str, many_rows: Path, tmp_path: Path
) -> None:
    with ScriptedEndpoint(refuse(status, error)) as endpoint:
        done = run(
            tmp_path / "out", f"--input={many_rows}", f"--base_url={endpoint.base_url}", "--num_workers=2", timeout_s=40
        )
    assert done.code == 1
    assert 0 < len(endpoint.requests) < 100
    assert done.seconds < 20
    tells_once(done, says)


def tells_once(done: Finished, says: str) -> None:
    """The reason is one line, the last one, and there is not much else but perhaps an example of it before."""
    assert done.lines[-1].startswith("error: ")
    assert [line for line in done.lines[:-1] if says in line and "requests fail (" not in line] == []
    assert says in done.lines[-1]
    assert "Traceback" not in done.stderr
    assert len(done.lines) < 10


def test_an_endpoint_that_is_not_there_stops_the_run_when_its_grace_is_over(many_rows: Path, tmp_path: Path) -> None:
    with socket.socket() as bound:  # bound, but not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        flags = (f"--input={many_rows}", f"--base_url={url}", "--num_workers=2", "--max_backoff_s=0.5")
        done = run(tmp_path / "out", *flags, "--max_retries=1000", timeout_s=60)
    assert done.code == 1
    assert 10 < done.seconds < 40
    tells_once(done, f"could not connect to the server at 127.0.0.1:{bound_port(url)}")


async def ask_to_log_in(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="<html><title>Please log in</title></html>", content_type="text/html")


async def refuse_fields(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"detail": [{"loc": ["body", "x"], "msg": "Extra inputs"}]}, status=422)


@pytest.mark.parametrize(
    ("handler", "says", "way_out"),
    [
        (ask_to_log_in, "(invalid_response): the answer is not a JSON object: Please log in", "check --base_url"),
        (refuse_fields, "(invalid_request): body.x: Extra inputs", "mend the rows"),
    ],
)
def test_an_endpoint_that_fails_all_first_requests_alike_stops_the_run_with_the_way_out(
    handler: Handler, says: str, way_out: str, many_rows: Path, tmp_path: Path
) -> None:
    with ScriptedEndpoint(handler) as endpoint:
        flags = (f"--input={many_rows}", f"--base_url={endpoint.base_url}", "--num_workers=2", "--max_in_flight=50")
        done = run(tmp_path / "out", *flags, timeout_s=60)
    assert done.code == 1
    assert done.seconds < 30
    assert 100 <= len(endpoint.requests) < 5000
    tells_once(done, says)
    assert endpoint.base_url in done.lines[-1]
    assert way_out in done.lines[-1]
    assert "--max_failed_ratio=1" in done.lines[-1]


def test_a_run_in_which_every_row_may_fail_leaves_a_record_of_each(tmp_path: Path) -> None:
    file = text_rows(tmp_path / "in.jsonl", 1500)
    with ScriptedEndpoint(refuse_fields) as endpoint:
        flags = (f"--input={file}", f"--base_url={endpoint.base_url}", "--num_workers=2", "--max_failed_ratio=1")
        done = run(tmp_path / "out", *flags, code=0)
    assert len(done.failed) == 1500
    assert "1,500 failed (invalid_request), for example r" in done.lines[-3]
    assert done.summary["failed_examples"]["invalid_request"].endswith(
        f" (HTTP 422 from {endpoint.base_url}): body.x: Extra inputs"
    )
    assert done.summary["requests_failed_at"] == {endpoint.base_url: 1500}


def test_slow_answers_among_many_quick_failures_that_are_all_alike_keep_the_run_going(tmp_path: Path) -> None:
    """The first answer comes seconds after hundreds of failures."""

    async def few_are_good(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if int(body["messages"][0]["content"].split()[1]) % 50:
            return await refuse_fields(request, body)
        await asyncio.sleep(4)
        return answer()

    file = text_rows(tmp_path / "in.jsonl", 1000)
    with ScriptedEndpoint(few_are_good) as endpoint:
        flags = (f"--input={file}", f"--base_url={endpoint.base_url}", "--num_workers=2")
        done = run(tmp_path / "out", *flags, code=3)
    assert (len(done.completed), len(done.failed)) == (20, 980)


def test_a_few_rows_that_are_all_refused_end_with_the_reason_the_endpoint_and_the_missing_key(tmp_path: Path) -> None:
    file = text_rows(tmp_path / "in.jsonl", 5)
    with ScriptedEndpoint(refuse(401, {"message": "Incorrect API key provided"})) as endpoint:
        flags = (f"--input={file}", f"--base_url={endpoint.base_url}", "--num_workers=1")
        done = run(tmp_path / "out", *flags, "--api_key_env=SOME_KEY", code=1)
        with_key = run(tmp_path / "out2", *flags, code=1, env={"OPENAI_API_KEY": "sk-wrong-123456"})
    begin = "error: 5 failed (authentication), for example r"
    assert done.lines[-3].startswith(begin)
    assert done.lines[-3].endswith(
        f" (HTTP 401 from {endpoint.base_url}): no key was sent, as $SOME_KEY is not set "
        "(--api_key_env names another variable): Incorrect API key provided"
    )
    assert with_key.lines[-3].startswith(begin)
    assert with_key.lines[-3].endswith(f"{endpoint.base_url}): Incorrect API key provided")


def test_why_requests_fail_is_shown_while_they_are_still_sent_again(tmp_path: Path) -> None:
    file = text_rows(tmp_path / "in.jsonl", 5)
    with ScriptedEndpoint(refuse(500, {"message": "CUDA error"})) as endpoint:
        flags = (f"--input={file}", f"--base_url={endpoint.base_url}", "--num_workers=1")
        with Command(tmp_path / "out", *flags) as command:
            wait_until(lambda: "\n" in command.stderr, 30, "first line")
            shown = command.stderr
    assert re.match(
        r"beam_llm: requests fail \(server_error\), for example r\d \(HTTP 500 from .*\): CUDA error\n", shown
    )


def bound_port(url: str) -> str:
    return url.rpartition(":")[2].removesuffix("/v1")


@pytest.fixture
def slow() -> Iterator[SimulatorThread]:
    """An endpoint that takes a second for each answer."""
    with SimulatorThread(Script(latency_ms=1000)) as simulator:
        yield simulator


@linux
@pytest.mark.parametrize(
    ("victim", "number", "says"),
    [
        ("a worker", signal.SIGKILL, "a worker process died"),
        ("the terminal's group", signal.SIGINT, "error: interrupted; run the same command again"),
        ("the terminal's group", signal.SIGTERM, "error: terminated; run the same command again"),
        ("the command", signal.SIGTERM, "error: terminated; run the same command again"),
    ],
)
def test_a_signal_in_the_middle_ends_the_run_within_seconds_and_leaves_no_process(
    victim: str, number: signal.Signals, says: str, slow: SimulatorThread, many_rows: Path, tmp_path: Path
) -> None:
    flags = (f"--input={many_rows}", f"--base_url={slow.base_url}", "--num_workers=2", "--max_in_flight=50")
    with Command(tmp_path / "out", *flags) as command:
        wait_until(lambda: slow.stats()["open"] > 60, 30, "requests of both workers")
        hit_s = time.monotonic()
        if victim == "the terminal's group":
            os.killpg(command.process.pid, number)
        else:
            os.kill(command.workers()[-1] if victim == "a worker" else command.process.pid, number)
        done = command.wait(30)
        assert time.monotonic() - hit_s < 10
        wait_until(lambda: not command.processes(), 3, "end of all its processes")
    assert done.code == 1
    assert says in done.lines[-1]
    assert "Traceback" not in done.stderr
    assert len(done.lines) < 5
    assert done.shards() == []


@linux
def test_an_interrupt_while_the_workers_start_ends_the_run_too(many_rows: Path, tmp_path: Path) -> None:
    """Beam 2.77 would wait for ever for a worker that comes up after its connection was closed."""
    with Command(tmp_path / "out", f"--input={many_rows}", "--base_url=simulated", "--num_workers=2") as command:
        wait_until(command.workers, 30, "worker process")
        command.process.send_signal(signal.SIGINT)
        done = command.wait(20)
        wait_until(lambda: not command.processes(), 3, "end of all its processes")
    assert done.code == 1
    assert done.lines[-1] == "error: interrupted; run the same command again"


def test_a_rerun_leaves_no_shard_of_the_run_before(tmp_path: Path) -> None:
    texts = {f"r{i}": f"row {i} {'x' * 300}" for i in range(300)}
    file = write_lines(tmp_path / "in.jsonl", *(request(name, text) for name, text in texts.items()))
    doomed = sorted(name for name, text in texts.items() if is_doomed(text, 0.2))
    flags = (f"--input={file}", "--model=m")
    first = run(
        tmp_path / "out", *flags, "--base_url=simulated?fail_rate=0.2&fail_status=400", "--num_workers=3", code=3
    )
    assert len(first.shards("completed")) > 1
    assert ids(first.failed) == doomed
    assert first.summary["completed"] == len(texts) - len(doomed)

    again = run(tmp_path / "out", *flags, "--base_url=simulated", "--num_workers=1", code=0)
    assert len(again.shards("completed")) == 1
    assert again.shards("failed") == []
    assert {record["custom_id"]: answer_of(record) for record in again.completed} == texts
    assert len(again.completed) == len(texts)


CANARY = "sk-canary-123"


async def tell_the_key(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answers some requests, and repeats the key that it was sent in every kind of error."""
    number = int(body["messages"][0]["content"].split()[1])
    said = f"Incorrect: {request.headers['Authorization']} is not {CANARY}"
    if number % 5 == 0:
        return answer(f"row {number}")
    if number % 5 == 1:
        return web.json_response({"error": {"message": said, "code": "bad"}}, status=400)
    if number % 5 == 2:
        return web.json_response({"detail": said}, status=422)
    if number % 5 == 3:
        return web.Response(text=f"<html>{said}</html>", status=500, content_type="text/html")
    return web.Response(text=said)


@linux
def test_the_key_reaches_the_endpoint_and_nothing_else(tmp_path: Path) -> None:
    file = text_rows(tmp_path / "in.jsonl", 200)
    seen: set[bytes] = set()
    with ScriptedEndpoint(tell_the_key) as endpoint:
        flags = (f"--input={file}", f"--base_url={endpoint.base_url}", "--num_workers=2", "--max_retries=1")
        debug = ("--default_sdk_harness_log_level=DEBUG", "--max_backoff_s=0.1", "--max_failed_ratio=0.8")
        with Command(tmp_path / "out", *flags, *debug, env={"OPENAI_API_KEY": CANARY}) as command:
            while command.process.poll() is None:
                seen.update(command.command_line(pid) for pid in command.processes())
                time.sleep(0.1)
            done = command.wait(1)
    assert done.code == 0, done.stderr
    assert {headers["Authorization"] for headers in endpoint.headers} == {f"Bearer {CANARY}"}
    assert len(done.completed) == 40
    assert set(done.summary["failed_by_kind"]) == {"invalid_request", "server_error", "invalid_response"}
    assert any(b"sdk_worker_main" in line for line in seen)
    assert not any(b"canary" in line for line in seen)
    assert "canary" not in done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != file]
    assert len(written) > 4
    assert [path for path in written if b"canary" in path.read_bytes()] == []


def test_a_terminal_shows_a_bar_with_the_rate_while_the_run_goes_on(tmp_path: Path) -> None:
    pty, termios, fcntl = (pytest.importorskip(name) for name in ("pty", "termios", "fcntl"))
    file = text_rows(tmp_path / "in.jsonl", 400)
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    flags = (f"--input={file}", "--base_url=simulated?latency_ms=300", "--max_in_flight=40", "--num_workers=1")
    with Command(tmp_path / "out", *flags, stderr=end) as command:
        os.close(end)
        drawn = b""
        with suppress(OSError):  # EIO: the command has closed its side
            while piece := os.read(terminal, 4096):
                drawn += piece
        os.close(terminal)
        done = command.wait(10)
    assert done.code == 0
    text = drawn.decode().replace("\r\n", "\n")
    counts = [int(found) for found in re.findall(r"(\d+)/\d+ \[[^\]]*row/s[^\]]*open=\d+", text)]
    assert [count for count in counts if 0 < count < 400], text
    assert counts == sorted(counts)
    assert counts[-1] == 400
    assert text.rstrip().rpartition("\n")[2].startswith("400 rows: 400 completed, 0 failed; 400 requests sent")


def test_a_log_file_gets_no_bar_and_the_summary_as_its_last_line(tmp_path: Path) -> None:
    file = text_rows(tmp_path / "in.jsonl", 20)
    done = run(tmp_path / "out", f"--input={file}", "--base_url=simulated", "--num_workers=1", code=0)
    assert "\r" not in done.stderr
    assert done.lines[-1].startswith("20 rows: 20 completed, 0 failed; 20 requests sent, 0 retries; ")
    assert len(done.lines) == 2
