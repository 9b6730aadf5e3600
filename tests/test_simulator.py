"""The simulator: what it refuses, that it answers each prompt with itself, and that it misbehaves as told."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

from beam_llm.errors import BeamLLMError
from beam_llm.simulator import FAULTS, Script, SimulatorProcess, SimulatorThread, is_doomed

JSON_TYPE = {"Content-Type": "application/json"}


def picture(image_format: str = "JPEG", size: tuple[int, int] = (64, 48)) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(buffer, image_format)
    return buffer.getvalue()


def data_url(data: bytes, media_type: str = "image/jpeg") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(content: Any = "hello there", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}


def ask(
    simulator: SimulatorThread | SimulatorProcess,
    body: Any,
    method: str = "POST",
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str], bytes]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with closing(HTTPConnection("127.0.0.1", simulator.port, timeout=10)) as connection:
        connection.request(method, path, raw, JSON_TYPE if headers is None else {**JSON_TYPE, **headers})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def answer(simulator: SimulatorThread | SimulatorProcess, body: Any, **kwargs: Any) -> dict[str, Any]:
    status, _, raw = ask(simulator, body, **kwargs)
    assert status == 200, raw
    parsed: dict[str, Any] = json.loads(raw)
    return parsed


def content_of(completion: dict[str, Any]) -> Any:
    return completion["choices"][0]["message"]["content"]


def status_of(simulator: SimulatorThread, text: str) -> int:
    return ask(simulator, chat(text))[0]


@pytest.fixture(scope="module")
def plain() -> Iterator[SimulatorThread]:
    with SimulatorThread() as simulator:
        yield simulator


JPEG = picture()
USER = {"role": "user", "content": "hi"}

REFUSED_BODIES: list[tuple[str, Any]] = [
    ("no JSON", b"{"),
    ("empty", b""),
    ("NaN", b'{"model": "m", "temperature": NaN}'),
    ("a list", []),
    ("no model", {"messages": [USER]}),
    ("empty model", {"model": "", "messages": [USER]}),
    ("no messages", {"model": "m"}),
    ("no message", {"model": "m", "messages": []}),
    ("messages as text", {"model": "m", "messages": "hi"}),
    ("message as text", {"model": "m", "messages": ["hi"]}),
    ("unknown role", {"model": "m", "messages": [{"role": "bot", "content": "hi"}]}),
    ("role as list", {"model": "m", "messages": [{"role": ["user"], "content": "hi"}]}),
    ("no content", {"model": "m", "messages": [{"role": "user"}]}),
    ("number as content", chat(5)),
    ("no parts", chat([])),
    ("part as text", chat(["hi"])),
    ("unknown part", chat([{"type": "video", "video": "x"}])),
    ("text of a part is no string", chat([{"type": "text", "text": 5}])),
    ("image_url as string", chat([{"type": "image_url", "image_url": data_url(JPEG)}])),
    ("image_url without url", chat([{"type": "image_url", "image_url": {}}])),
    ("unknown detail", chat([{"type": "image_url", "image_url": {"url": "http://h/a.png", "detail": "max"}}])),
    ("path as image", chat([image_part("/tmp/a.png")])),  # noqa: S108 - never opened
    ("file URL as image", chat([image_part("file:///tmp/a.png")])),
    ("image of the system", {"model": "m", "messages": [{"role": "system", "content": [image_part("http://h/a")]}]}),
    ("data URL that is not base64", chat([image_part("data:image/jpeg,abc")])),
    ("base64 with a line end", chat([image_part(data_url(JPEG) + "\n")])),
    ("base64 that is too short by a character", chat([image_part(data_url(JPEG).rstrip("=")[:-1] + "=")])),
    ("base64 outside ASCII", chat([image_part("data:image/jpeg;base64,é")])),
    ("no image", chat([image_part(data_url(b"hello"))])),
    ("empty image", chat([image_part(data_url(b""))])),
    ("JPEG cut in half", chat([image_part(data_url(JPEG[: len(JPEG) // 2]))])),
    ("PNG cut short", chat([image_part(data_url(picture("PNG")[:-40], "image/png"))])),
    ("PNG called JPEG", chat([image_part(data_url(picture("PNG")))])),
    ("BMP", chat([image_part(data_url(picture("BMP"), "image/bmp"))])),
    ("BMP called PNG", chat([image_part(data_url(picture("BMP"), "image/png"))])),
    ("a key called extra_body", chat(extra_body={"top_k": 5})),
    ("temperature", chat(temperature=2.1)),
    ("temperature as text", chat(temperature="1")),
    ("temperature as boolean", chat(temperature=True)),
    ("top_p", chat(top_p=0)),
    ("max_tokens 0", chat(max_tokens=0)),
    ("max_tokens 1.5", chat(max_tokens=1.5)),
    ("max_completion_tokens", chat(max_completion_tokens=-1)),
    ("n", chat(n=0)),
    ("n too many", chat(n=129)),
    ("top_logprobs alone", chat(top_logprobs=3)),
    ("stop", chat(stop=["a", "b", "c", "d", "e"])),
    ("stream", chat(stream=True)),
    ("chat_template_kwargs", chat(chat_template_kwargs=[])),
    ("response_format", chat(response_format={"type": "yaml"})),
    ("json_schema without a name", chat(response_format={"type": "json_schema", "json_schema": {"schema": {}}})),
    ("schema of no known type", chat(response_format=schema_format({"type": "colour"}))),
    ("schema that requires itself", chat(response_format=schema_format({"$ref": "#"}))),
]


@pytest.mark.parametrize("body", [body for _, body in REFUSED_BODIES], ids=[name for name, _ in REFUSED_BODIES])
def test_bad_body_is_400_with_a_nested_error(plain: SimulatorThread, body: Any) -> None:
    status, headers, raw = ask(plain, body)
    error = json.loads(raw)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"]
    assert headers["x-request-id"].startswith("req-")


ACCEPTED_BODIES: list[tuple[str, Any]] = [
    ("null means not given", chat(temperature=None, max_tokens=None, stop=None, response_format=None)),
    ("vLLM's fields", chat(top_k=-1, min_p=0.1, repetition_penalty=1.1, chat_template_kwargs={})),
    ("an unknown field", chat(colour="red")),
    (
        "a tool call and its result",
        {
            "model": "m",
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]},
                {"role": "tool", "tool_call_id": "c", "content": "4"},
            ],
        },
    ),
    (
        "system text in parts",
        {"model": "m", "messages": [{"role": "system", "content": [{"type": "text", "text": "x"}]}]},
    ),
    ("an image URL", chat([image_part("https://example.org/a.png?x=1")])),
]


@pytest.mark.parametrize("body", [body for _, body in ACCEPTED_BODIES], ids=[name for name, _ in ACCEPTED_BODIES])
def test_good_body_is_answered(plain: SimulatorThread, body: Any) -> None:
    assert answer(plain, body)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/chat/completions", {}, 405),
        ("POST", "/v1/chat/completions/", {}, 404),
        ("POST", "/chat/completions", {}, 404),
        ("POST", "/v1/v1/chat/completions", {}, 404),
        ("POST", "/v1/chat/completions", {"Content-Type": "text/plain"}, 415),
        ("POST", "/v1/chat/completions", {"x-simulate": "latency=5"}, 400),
        ("GET", "/health", {}, 200),
        ("GET", "/v1/models", {}, 200),
    ],
)
def test_wrong_way_in(plain: SimulatorThread, method: str, path: str, headers: dict[str, str], status: int) -> None:
    got, _, raw = ask(plain, chat(), method, path, headers)
    assert got == status
    if status >= 400:
        assert json.loads(raw)["error"]["message"]


def test_strict_fields_model_key_and_body_size() -> None:
    script = Script(strict_fields=True, models=("a", "b"), api_key="k-1", max_body_bytes=2000)
    with SimulatorThread(script) as simulator:
        key = {"Authorization": "Bearer k-1"}
        cases = [
            (chat(model="a"), key, 200, None),
            (chat(model="a", top_k=4), key, 200, None),
            (chat(model="a", colour="red"), key, 400, "unknown_parameter"),
            (chat(model="c"), key, 404, "model_not_found"),
            (chat(model="a"), {}, 401, "invalid_api_key"),
            (chat(model="a"), {"Authorization": "Bearer k-2"}, 401, "invalid_api_key"),
            (chat("x" * 2000, model="a"), key, 413, None),
        ]
        for body, headers, status, code in cases:
            got, _, raw = ask(simulator, body, headers=headers)
            assert (got, json.loads(raw).get("error", {}).get("code")) == (status, code)
        models = answer(simulator, b"", method="GET", path="/v1/models", headers=key)
        assert [model["id"] for model in models["data"]] == ["a", "b"]
        assert ask(simulator, b"", "GET", "/v1/models")[0] == 401


def test_echoes_last_user_text_and_its_images_in_order(plain: SimulatorThread) -> None:
    parts = [
        {"type": "text", "text": "which is"},
        image_part(data_url(JPEG)),
        {"type": "text", "text": "larger?"},
        *(image_part(data_url(picture(name, (30, 20)), f"image/{name.lower()}")) for name in ("PNG", "WEBP", "GIF")),
        image_part("http://h/a.jpg"),
    ]
    body = chat(parts)
    body["messages"] = [USER, {"role": "assistant", "content": "no"}, *body["messages"]]
    completion = answer(plain, body)
    images = "[image JPEG 64x48] [image PNG 30x20] [image WEBP 30x20] [image GIF 30x20] [image http://h/a.jpg]"
    assert content_of(completion) == f"which is\nlarger? {images}"
    assert completion["usage"] == {"prompt_tokens": 5 + 5 * 85, "completion_tokens": 17, "total_tokens": 447}


def test_large_image_is_checked_as_well(plain: SimulatorThread) -> None:
    big = picture("PNG", (1, 1)) + b"\0" * 200_000  # trailing bytes are no fault; they only make the body large
    for _ in range(2):
        assert content_of(answer(plain, chat([image_part(data_url(big, "image/png"))]))) == "[image PNG 1x1]"
        assert ask(plain, chat([image_part(data_url(big, "image/jpeg"))]))[0] == 400


def test_max_tokens_cuts_the_answer(plain: SimulatorThread) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        completion = answer(plain, chat("one two three", **{name: 2}))
        assert (content_of(completion), completion["choices"][0]["finish_reason"]) == ("one two", "length")
    assert answer(plain, chat("one two", max_tokens=2))["choices"][0]["finish_reason"] == "stop"


def test_n_logprobs_and_reasoning(plain: SimulatorThread) -> None:
    fields = {"n": 3, "logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"enable_thinking": True}}
    completion = answer(plain, chat("one two", **fields))
    assert [choice["index"] for choice in completion["choices"]] == [0, 1, 2]
    tokens = completion["choices"][2]["logprobs"]["content"]
    assert [(token["token"], len(token["top_logprobs"])) for token in tokens] == [("one", 2), ("two", 2)]
    assert "one two" in completion["choices"][0]["message"]["reasoning_content"]
    assert "reasoning_content" not in answer(plain, chat())["choices"][0]["message"]


def test_json_answers_follow_the_schema(plain: SimulatorThread) -> None:
    schema = {
        "type": "object",
        "properties": {
            "label": {"enum": ["cat", "dog"]},
            "sure": {"type": "boolean"},
            "kind": {"const": "pet"},
            "score": {"type": "number", "minimum": 0, "maximum": 0.5},
            "count": {"type": "integer", "exclusiveMinimum": 4},
            "why": {"type": "string", "maxLength": 5},
            "long": {"type": "string", "minLength": 9},
            "tags": {"type": "array", "items": {"type": ["null", "string"]}, "minItems": 2},
            "node": {"$ref": "#/$defs/node"},
            "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}},
    }
    got = json.loads(content_of(answer(plain, chat("what pet", response_format=schema_format(schema)))))
    assert got.pop("label") in ("cat", "dog")
    assert got.pop("node").keys() == {"next"}
    assert got == {
        "sure": True,
        "kind": "pet",
        "score": 0.25,
        "count": 5,
        "why": "what ",
        "long": "what pet.",
        "tags": [None, None],
        "either": 1,
    }
    got = json.loads(content_of(answer(plain, chat("what pet", response_format={"type": "json_object"}))))
    assert got == {"answer": "what pet"}


def test_permanent_failure_comes_again_and_says_its_code() -> None:
    script = Script(fail_rate=0.5, fail_status=429, fail_code="insufficient_quota", retry_after_s=2)
    with SimulatorThread(script) as simulator:
        for number in range(12):
            text = f"question {number}"
            for _ in range(2):
                status, headers, raw = ask(simulator, chat(text))
                assert status == (429 if is_doomed(text, 0.5) else 200)
                if status == 429:
                    assert headers["retry-after"] == "2"
                    assert json.loads(raw)["error"]["code"] == "insufficient_quota"


def test_transient_errors_are_drawn_anew_for_every_attempt() -> None:
    with SimulatorThread(Script(error_rate=0.5, error_statuses=(503, 500), seed=7)) as simulator:
        statuses = [status_of(simulator, "the same") for _ in range(60)]
        assert set(statuses) == {200, 500, 503}
        assert 15 <= statuses.count(200) <= 45
        simulator.reset()
        assert [status_of(simulator, "the same") for _ in range(60)] == statuses
        assert simulator.stats()["by_fault"] == {"transient": 60 - statuses.count(200)}


def test_fail_first_fails_each_body_so_many_times() -> None:
    with SimulatorThread(Script(fail_first=2, error_statuses=(500,))) as simulator:
        assert [status_of(simulator, text) for text in "ababab"] == [500, 500, 500, 500, 200, 200]


def test_faults_in_the_body() -> None:
    with SimulatorThread() as simulator:
        found = {}
        for fault in ("html", "error_in_200", "empty_choices", "null_content", "not_json"):
            found[fault] = ask(simulator, chat(), headers={"x-simulate": f"fault_rate=1&faults={fault}"})
        assert {fault: status for fault, (status, _, _) in found.items() if status != 200} == {"html": 502}
        assert found["html"][1]["content-type"] == "text/html"
        assert found["html"][2].startswith(b"<html>")
        assert json.loads(found["error_in_200"][2])["error"]["type"] == "server_error"
        assert json.loads(found["empty_choices"][2])["choices"] == []
        assert content_of(json.loads(found["null_content"][2])) is None
        with pytest.raises(json.JSONDecodeError):
            json.loads(found["not_json"][2])
        assert simulator.stats()["by_fault"] == dict.fromkeys(found, 1)
        assert simulator.stats()["answered"] == 0


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("reset", aiohttp.ClientOSError),
        ("close", aiohttp.ServerDisconnectedError),
        ("truncate", aiohttp.ClientPayloadError),
        ("stall", asyncio.TimeoutError),
        ("stall_body", asyncio.TimeoutError),
    ],
)
def test_faults_of_the_connection(fault: str, error: type[Exception], capfd: pytest.CaptureFixture[str]) -> None:
    async def post(base_url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=0.1 if fault.startswith("stall") else 5)
        url = f"{base_url}/chat/completions"
        async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=chat()) as response:
            await response.read()

    with SimulatorThread(Script(fault_rate=1, faults=(fault,))) as simulator:
        with pytest.raises(error):
            asyncio.run(post(simulator.base_url))
        wait_until(lambda: simulator.stats()["open"] == 0)
        assert simulator.stats()["by_fault"][fault] == 1
        assert simulator.stats()["by_status"] == {}
        assert simulator.stats()["by_fault"].get("client_left", 0) == fault.startswith("stall")
    assert capfd.readouterr().err == ""


async def post_all(base_url: str, texts: list[str]) -> list[int]:
    async def post(session: aiohttp.ClientSession, text: str) -> int:
        async with session.post(f"{base_url}/chat/completions", json=chat(text)) as response:
            await response.read()
            return response.status

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(post(session, text) for text in texts))


def test_hold_until_answers_nothing_before_the_number_is_open() -> None:
    with SimulatorThread(Script(hold_until=40)) as simulator:
        waiting = threading.Thread(target=lambda: asyncio.run(post_all(simulator.base_url, ["x"] * 39)))
        waiting.start()
        wait_until(lambda: simulator.stats()["open"] == 39)
        assert simulator.stats()["by_status"] == {}
        assert status_of(simulator, "the fortieth") == 200
        waiting.join(5)
        assert simulator.stats()["by_status"] == {"200": 40}
        assert simulator.stats()["peak_open"] == 40
        assert status_of(simulator, "held no more") == 200


def test_max_open_refuses_what_is_more() -> None:
    with SimulatorThread(Script(max_open=3, retry_after_s=0.5)) as simulator:
        stalled = [HTTPConnection("127.0.0.1", simulator.port, timeout=10) for _ in range(3)]
        for connection in stalled:
            headers = {**JSON_TYPE, "x-simulate": "fault_rate=1&faults=stall"}
            connection.request("POST", "/v1/chat/completions", json.dumps(chat()), headers)
        wait_until(lambda: simulator.stats()["open"] == 3)
        status, headers, raw = ask(simulator, chat())
        assert (status, headers["retry-after"]) == (429, "0.5")
        assert json.loads(raw)["error"]["code"] == "rate_limit_exceeded"
        stalled[0].close()
        wait_until(lambda: simulator.stats()["open"] == 2)
        assert status_of(simulator, "room again") == 200
        for connection in stalled:
            connection.close()


def test_stats_and_reset() -> None:
    with SimulatorThread() as simulator:
        bodies = [json.dumps(chat(text)).encode() for text in ("a", "b", "a")]
        for body in bodies:
            answer(simulator, body)
        ask(simulator, b"{")
        assert simulator.stats() == {
            "requests": 4,
            "open": 0,
            "peak_open": 1,
            "by_status": {"200": 3, "400": 1},
            "by_fault": {},
            "distinct_prompts": 2,
            "answered": 3,
            "distinct_answered": 2,
            "bytes_in": sum(map(len, bodies)) + 1,
            "connections": 4,
        }
        simulator.reset()
        assert simulator.stats()["requests"] == 0


def wait_until(condition: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """A zombie that nobody has waited for counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_process_starts_answers_stops_and_leaves_no_process() -> None:
    with SimulatorProcess(Script(latency_ms=1, seed=3)) as simulator:
        pid = simulator.pid
        assert pid is not None
        assert is_alive(pid)
        assert content_of(answer(simulator, chat("who?"))) == "who?"
        assert simulator.stats()["answered"] == 1
    assert not is_alive(pid)
    assert simulator.pid is None


def test_process_stops_in_spite_of_a_stalled_request() -> None:
    with SimulatorProcess(Script(fault_rate=1, faults=("stall",))) as simulator:
        pid = simulator.pid
        with closing(HTTPConnection("127.0.0.1", simulator.port)) as connection:
            connection.request("POST", "/v1/chat/completions", json.dumps(chat()), JSON_TYPE)
            wait_until(lambda: simulator.stats()["open"] == 1)
            simulator.__exit__()
    assert pid is not None
    assert not is_alive(pid)


def test_process_dies_with_its_parent() -> None:
    code = (
        "import time\nfrom beam_llm.simulator import SimulatorProcess\n"
        "with SimulatorProcess() as s:\n    print(s.pid, flush=True)\n    time.sleep(60)"
    )
    root = str(Path(__file__).resolve().parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))


def test_command_line_refuses_a_bad_script_and_explains_itself() -> None:
    command = [sys.executable, "-m", "beam_llm.simulator"]
    bad = subprocess.run([*command, "--script", "latency=5"], capture_output=True, text=True, check=False, timeout=60)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "did you mean 'latency_ms'" in bad.stderr
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert [name for name in (*Script.__dataclass_fields__, *FAULTS) if name not in told] == []


def test_process_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BeamLLMError, match="exit code 1"), SimulatorProcess():
        pass
