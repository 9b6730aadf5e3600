from __future__ import annotations

import asyncio
import base64
import gc
import inspect
import io
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from PIL import Image, ImageDraw

from beam_llm.compat import FAIL_MSG, MPOpenAIAPI, base_url, open_requests
from beam_llm.errors import ConfigError, RunStoppedError
from beam_llm.process_limits import allow_connections, most_connections
from tests.endpoint import ScriptedEndpoint, answer, echo, last_text

# A run that is broken off leaves Beam's sinks to the garbage collector, which tells of their files in a later test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

DEFAULTS: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.0,
    "presence_penalty": 1.0,
    "repetition_penalty": 1.0,
    "max_tokens": 16384,
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No endpoint or key from outside; the folder that temporary folders are made in."""
    for name in ("OPENAI_API_KEY", "OPENAI_API_BASE", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def api_for(endpoint: ScriptedEndpoint, **settings: Any) -> MPOpenAIAPI:
    settings = {"wait": 0.001, "verbose": False, **settings}
    return MPOpenAIAPI("m", api_base="http://127.0.0.1", port=endpoint.port, **settings)


def picture_of(body: dict[str, Any], number: int = 0) -> Image.Image:
    parts = [part for part in body["messages"][-1]["content"] if part["type"] == "image_url"]
    _, _, data = parts[number]["image_url"]["url"].partition("base64,")
    return Image.open(io.BytesIO(base64.b64decode(data)))


NO_KEY = (
    "no key was sent, as $OPENAI_API_KEY is not set (--api_key_env names another variable): Incorrect API key provided"
)


async def refuse(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response(
        {"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}}, status=401
    )


# The constructor.


def test_the_constructor_has_the_old_arguments_in_their_order_with_their_defaults() -> None:
    parameters = inspect.signature(MPOpenAIAPI).parameters
    positional = {n: p.default for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items())[1:] == [
        ("key", None),
        ("api_base", None),
        ("port", None),
        ("retry", 10),
        ("wait", 3),
        ("timeout", (30, 1800)),
        *DEFAULTS.items(),
        ("thread_num", 8192),
        ("return_dict", False),
        ("max_connections", None),
        ("num_workers", min(os.cpu_count() or 1, 8)),
        ("worker_concurrency", None),
        ("enable_thinking", False),
    ]
    assert next(iter(positional)) == "model"


def test_exactly_the_old_defaults_are_sent() -> None:
    with ScriptedEndpoint(echo) as endpoint, api_for(endpoint) as api:
        assert api.generate(["hello"]) == ["hello"]
        assert endpoint.requests == [
            {
                "model": "m",
                **DEFAULTS,
                "chat_template_kwargs": {"enable_thinking": False},
                "messages": [{"role": "user", "content": "hello"}],
            }
        ]
        assert endpoint.paths == ["/v1/chat/completions"]
        assert "Authorization" not in endpoint.headers[0]


def test_more_keywords_go_into_the_body_and_none_leaves_a_field_out() -> None:
    without = dict.fromkeys(DEFAULTS)
    with (
        ScriptedEndpoint(echo) as endpoint,
        api_for(endpoint, **without, enable_thinking=None, seed=7, stop=["END"]) as api,
    ):
        api.generate_inner("hello")
        assert endpoint.requests == [
            {"model": "m", "seed": 7, "stop": ["END"], "messages": [{"role": "user", "content": "hello"}]}
        ]


def test_key_and_endpoint_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedEndpoint(echo) as endpoint:
        monkeypatch.setenv("OPENAI_API_BASE", endpoint.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-from-outside")
        with MPOpenAIAPI("m", verbose=False) as api:
            assert api.generate(["hello"]) == ["hello"]
        with MPOpenAIAPI("m", key="", verbose=False) as api:
            assert api.generate_inner("hello")[0] == 0
        assert [headers.get("Authorization") for headers in endpoint.headers] == ["Bearer sk-from-outside", None]


def test_a_key_is_sent_and_is_in_the_environment_only_until_shutdown() -> None:
    with ScriptedEndpoint(echo) as endpoint:
        api = api_for(endpoint, key="sk-given")
        holding = [name for name, value in os.environ.items() if value == "sk-given"]
        assert len(holding) == 1
        assert holding[0].startswith("BEAM_LLM_COMPAT_KEY_")
        api.generate(["hello"])
        api.shutdown()
        assert endpoint.headers[0]["Authorization"] == "Bearer sk-given"
        assert "sk-given" not in os.environ.values()


@pytest.mark.parametrize(
    ("api_base", "port", "expected"),
    [
        ("http://10.0.0.1", 8000, "http://10.0.0.1:8000"),
        ("http://10.0.0.1/", "8000", "http://10.0.0.1:8000"),
        ("http://h:1/v1", None, "http://h:1/v1"),
    ],
)
def test_a_port_is_put_behind_the_host(api_base: str, port: int | str | None, expected: str) -> None:
    assert base_url(api_base, port) == expected


@pytest.mark.parametrize("api_base", ["http://h/v1", "http://h:1"])
def test_a_port_besides_a_path_or_another_port_is_refused(api_base: str) -> None:
    with pytest.raises(ConfigError, match="port=8000 goes with an api_base such as"):
        base_url(api_base, 8000)


def test_no_endpoint_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="set OPENAI_API_BASE"):
        MPOpenAIAPI("m")


@pytest.mark.parametrize(
    ("thread_num", "worker_concurrency", "max_connections", "workers", "expected"),
    [
        (8192, None, None, 8, 1024),
        (10, None, None, 4, 3),
        (8192, 50, None, 8, 50),
        (8192, None, 100, 8, 100),
        (8192, 50, 100, 8, 50),
    ],
)
def test_the_threads_of_old_are_shared_out_among_the_workers(
    thread_num: int, worker_concurrency: int | None, max_connections: int | None, workers: int, expected: int
) -> None:
    assert open_requests(thread_num, worker_concurrency, max_connections, workers=workers) == expected


def test_the_limit_of_open_files_bounds_the_open_requests() -> None:
    most = most_connections()
    if most is None:
        pytest.skip("this system sets no limit")
    assert open_requests(most + 1, None, None, workers=1) == most
    allow_connections(most)


@pytest.mark.parametrize("name", ["thread_num", "worker_concurrency", "max_connections", "num_workers"])
def test_a_number_below_one_is_refused_by_its_name(name: str) -> None:
    settings: dict[str, Any] = {"api_base": "http://h", name: 0}
    with pytest.raises(ConfigError, match=f"{name} must be 1 or more, got 0"):
        MPOpenAIAPI("m", **settings)


# generate.


def test_answers_come_in_the_order_of_the_prompts_and_again_for_a_second_list() -> None:
    async def later_ones_first(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.2 - int(last_text(body)) / 1000)
        return answer(last_text(body))

    with ScriptedEndpoint(later_ones_first) as endpoint, api_for(endpoint) as api:
        for texts in ([str(i) for i in range(200)], ["3", "1", "2", "1"]):
            assert api.generate(texts) == texts
            assert (api.succeeded, api.failed, api.failures) == (len(texts), 0, {})
    assert endpoint.peak > 100, "the answers were waited for one by one"


def test_an_empty_list_asks_nothing() -> None:
    with ScriptedEndpoint(echo) as endpoint, api_for(endpoint) as api:
        assert api.generate([]) == []
        assert endpoint.requests == []


@pytest.mark.parametrize("wrong", ["one prompt", {"role": "user", "content": "one prompt"}])
def test_a_prompt_that_is_no_list_of_prompts_is_refused(wrong: Any) -> None:
    with MPOpenAIAPI("m", api_base="http://h") as api, pytest.raises(TypeError, match="list of prompts"):
        api.generate(wrong)


def test_every_form_of_prompt_and_picture_is_taken(tmp_path: Path) -> None:
    red = Image.new("RGB", (8, 6), (250, 10, 10))
    red.save(tmp_path / "red.png")
    data = (tmp_path / "red.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    pictures: list[Any] = [red, data, memoryview(data), tmp_path / "red.png", str(tmp_path / "red.png"), url]
    pictures += [{"bytes": data, "path": None}, {"bytes": None, "path": str(tmp_path / "red.png")}]
    prompts: list[Any] = [[{"type": "image", "value": one}, {"type": "text", "value": "in parts"}] for one in pictures]
    prompts += [[red, "bare"], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]]
    with ScriptedEndpoint(echo) as endpoint, api_for(endpoint) as api:
        assert api.generate(prompts) == [*["in parts"] * len(pictures), "bare", ""]
        colours = {picture_of(body).convert("RGB").getpixel((3, 3)) for body in endpoint.requests}
    assert colours == {(250, 10, 10)}


def test_prompts_may_be_made_one_by_one_even_from_one_picture_drawn_over() -> None:
    def drawn() -> Iterator[list[Any]]:
        canvas = Image.new("L", (4, 4))
        for shade in range(0, 250, 10):
            ImageDraw.Draw(canvas).rectangle((0, 0, 4, 4), fill=shade)
            yield [canvas, str(shade)]

    async def shade_of(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return answer(str(picture_of(body).getpixel((1, 1))))

    with ScriptedEndpoint(shade_of) as endpoint, api_for(endpoint) as api:
        assert api.generate(drawn()) == [str(shade) for shade in range(0, 250, 10)]


def test_failures_leave_the_fail_msg_in_their_place_and_are_counted_with_their_reason() -> None:
    async def some_fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if last_text(body) == "too long":
            return web.json_response({"error": {"message": "context too long", "type": "BadRequestError"}}, status=400)
        return answer(None) if last_text(body) == "silent" else answer(last_text(body))

    prompts = [
        "a",
        "too long",
        "b",
        {"type": "image", "value": "/no/such.png"},
        17,
        [{"type": "x", "y": {1}}],
        "silent",
    ]
    with ScriptedEndpoint(some_fail) as endpoint, api_for(endpoint, fail_msg="?") as api:
        assert api.generate(prompts) == ["a", "?", "b", "?", "?", "?", "?"]
    assert (api.succeeded, api.failed) == (2, 5)
    assert {index: reason.partition(":")[0] for index, reason in api.failures.items()} == {
        1: "invalid_request",
        3: "bad_image",
        4: "bad_input",
        5: "bad_input",
        6: "null_content",
    }
    assert "context too long" in api.failures[1]
    assert FAIL_MSG == "Failed to obtain answer via API."


def test_a_request_is_sent_again_until_its_retries_are_used_up() -> None:
    async def overloaded(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "busy"}}, status=503)

    with ScriptedEndpoint(overloaded) as endpoint, api_for(endpoint, retry=2) as api:
        assert api.generate(["a"]) == [FAIL_MSG]
        assert len(endpoint.requests) == 3


def test_with_return_dict_answers_are_dicts_and_what_is_none_has_failed() -> None:
    texts = ['{"n": 1}', '```json\n{"n": 2}\n```', 'Here it is: {"n": {"m": 3}} as asked.', "no object", "[1, 2]"]
    with ScriptedEndpoint(echo) as endpoint, api_for(endpoint, return_dict=True) as api:
        assert api.generate(texts) == [{"n": 1}, {"n": 2}, {"n": {"m": 3}}, FAIL_MSG, FAIL_MSG]
        assert (api.succeeded, api.failed) == (3, 2)
        assert api.failures[3] == "not_json: not one JSON object in 'no object'"
        assert api.generate_inner(texts[1])[:2] == (0, {"n": 2})
        code, text, response = api.generate_inner("no object")
        assert (code, text, response["choices"][0]["message"]["content"]) == (-1, FAIL_MSG, "no object")


def test_progress_and_a_summary_are_written_only_if_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    with ScriptedEndpoint(echo) as endpoint:
        with api_for(endpoint, verbose=False) as api:
            api.generate(["a", "b"])
        assert "prompts" not in capfd.readouterr().err
        with api_for(endpoint, verbose=True) as api:
            api.generate(["a", "b", 17])
        told = capfd.readouterr().err
    assert "3 prompts: 2 succeeded, 1 failed, bad_input 1; 2 requests sent, 0 retries" in told
    why = "1 failed (bad_input), for example prompt 2: messages: expected a string or a list, got int '17'"
    assert f"beam_llm: {why}\nbeam_llm: 3 prompts: " in told


def test_a_bad_key_ends_the_run_in_one_line_and_a_mended_server_is_asked_anew(environment: Path) -> None:
    with ScriptedEndpoint(refuse) as endpoint, api_for(endpoint) as api:
        with pytest.raises(RunStoppedError) as raised:
            api.generate([str(i) for i in range(100)])
        assert str(raised.value) == (
            f"20 requests in a row were refused by http://127.0.0.1:{endpoint.port} (authentication): {NO_KEY}"
        )
        assert len(endpoint.requests) < 60
        assert list(environment.iterdir()) == []
        endpoint.handler = echo
        assert api.generate(["a", "b"]) == ["a", "b"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal: a process that a script has started in the background ignores it from its birth."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_a_keyboard_interrupt_that_cancels_what_is_open() -> None:
    async def interrupts(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if last_text(body) == "19":
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)
        return answer()

    with ScriptedEndpoint(interrupts) as endpoint, api_for(endpoint) as api:
        with pytest.raises(KeyboardInterrupt):
            api.generate([str(i) for i in range(20)])
        assert [t.name for t in threading.enumerate() if t.name == "beam_llm-loop"] == []


def test_generate_works_outside_the_main_thread() -> None:
    answers: list[str] = []
    with ScriptedEndpoint(echo) as endpoint, api_for(endpoint) as api:
        thread = threading.Thread(target=lambda: answers.extend(api.generate(["a", "b"])))
        thread.start()
        thread.join(60)
    assert answers == ["a", "b"]


def test_generate_works_inside_a_running_event_loop() -> None:
    async def cell(api: MPOpenAIAPI) -> list[str]:
        return api.generate(["a", "b"])

    with ScriptedEndpoint(echo) as endpoint, api_for(endpoint) as api:
        assert asyncio.run(cell(api)) == ["a", "b"]


# generate_inner and shutdown.


def test_generate_inner_gives_code_answer_and_response() -> None:
    with ScriptedEndpoint(echo) as endpoint, api_for(endpoint) as api:
        code, text, response = api.generate_inner([Image.new("RGB", (4, 4)), "hello"])
        assert (code, text, response["usage"]["total_tokens"]) == (0, "hello", 5)
        assert api.generate_inner(17) == (
            -1,
            FAIL_MSG,
            "bad_input: messages: expected a string or a list, got int '17'",
        )
        endpoint.handler = refuse
        assert api.generate_inner("x") == (-1, FAIL_MSG, f"authentication: {NO_KEY}")


def test_many_threads_may_call_generate_inner_even_when_the_run_is_doomed() -> None:
    with ScriptedEndpoint(refuse) as endpoint, api_for(endpoint) as api:
        codes: list[int] = []
        threads = [threading.Thread(target=lambda: codes.append(api.generate_inner("x")[0])) for _ in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert codes == [-1] * 60
        endpoint.handler = echo
        assert api.generate_inner("x")[0] == 0


def test_shutdown_leaves_no_thread_and_no_folder_and_nothing_can_be_asked_afterwards(environment: Path) -> None:
    with ScriptedEndpoint(echo) as endpoint:
        api = api_for(endpoint)
        api.generate([Image.new("RGB", (4, 4)), "b"])
        api.shutdown()
        api.shutdown()
        gc.collect()
        assert [t.name for t in threading.enumerate() if "beam_llm" in t.name] == []
        assert list(environment.iterdir()) == []
        with pytest.raises(RuntimeError, match=r"shutdown\(\) has been called"):
            api.generate(["a"])


def test_an_object_that_is_dropped_shuts_down_by_itself() -> None:
    with ScriptedEndpoint(echo) as endpoint:
        api = api_for(endpoint, key="sk-dropped")
        api.generate_inner("a")
        del api
        gc.collect()
        assert "sk-dropped" not in os.environ.values()
        assert "beam_llm-loop" not in [t.name for t in threading.enumerate()]
