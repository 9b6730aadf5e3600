"""What we take for granted about llama.cpp's server, so that a test of ours that fails against it means us."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import pytest
from PIL import Image

from tests.integration.llama_server import MODEL, TOKENS_PER_SLOT, LlamaServer

Answer = tuple[int, dict[str, Any]]

COLOUR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "sharp": {"type": "boolean"}},
    "required": ["colour", "sharp"],
    "additionalProperties": False,
}


def ask(server: LlamaServer, *bodies: Mapping[str, Any], api_key: str | None = None) -> list[Answer]:
    """Post all bodies at once, each on a connection of its own; statuses and JSON bodies in order."""

    async def post(session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Answer:
        async with session.post(f"{server.base_url}/chat/completions", json=body) as response:
            return response.status, await response.json()

    async def post_all() -> Sequence[Answer]:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=20)
        async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
            return await asyncio.gather(*(post(session, body) for body in bodies))

    return list(asyncio.run(post_all()))


def question(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}


def picture(image_format: str, colour: str = "orange") -> dict[str, Any]:
    """An `image_url` part with a data URL."""
    buffer = io.BytesIO()
    Image.new("RGB", (96, 64), colour).save(buffer, image_format)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{image_format.lower()};base64,{encoded}"}}


def test_answers_text_with_usage(llama_server: LlamaServer) -> None:
    [(status, body)] = ask(llama_server, question("Is it red?"))
    assert status == 200
    assert body["model"] == MODEL
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["message"]["content"]
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 8


def test_same_seed_gives_the_same_answer(llama_server: LlamaServer) -> None:
    [(_, first)] = ask(llama_server, question("Say something", seed=7))
    [(_, again)] = ask(llama_server, question("Say something", seed=7))
    [(_, other)] = ask(llama_server, question("Say something", seed=8))
    assert first["choices"][0]["message"] == again["choices"][0]["message"]
    assert first["choices"][0]["message"] != other["choices"][0]["message"]


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
def test_takes_pictures_as_data_urls(llama_server: LlamaServer, image_format: str) -> None:
    text = {"type": "text", "text": "Compare the two."}
    both = [text, picture(image_format), picture(image_format, "navy")]
    (_, without), (status, body) = ask(llama_server, question([text]), question(both))
    assert status == 200
    assert body["choices"][0]["message"]["content"]
    assert body["usage"]["prompt_tokens"] >= without["usage"]["prompt_tokens"] + 2 * 16


@pytest.mark.parametrize("image_format", ["WEBP", "TIFF"])
def test_refuses_pictures_it_cannot_decode(llama_server: LlamaServer, image_format: str) -> None:
    [(status, body)] = ask(llama_server, question([{"type": "text", "text": "What is it?"}, picture(image_format)]))
    assert status == 400
    assert "image" in body["error"]["message"]


def test_json_schema_is_obeyed(llama_server: LlamaServer) -> None:
    schema = {"name": "colour", "strict": True, "schema": COLOUR_SCHEMA}
    body = question("Which colour?", max_tokens=64, response_format={"type": "json_schema", "json_schema": schema})
    [(status, answer)] = ask(llama_server, body)
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "stop"
    content = json.loads(answer["choices"][0]["message"]["content"])
    assert content.keys() == {"colour", "sharp"}
    assert content["colour"] in ("red", "green")
    assert isinstance(content["sharp"], bool)


def test_n_2_gives_two_choices(llama_server: LlamaServer) -> None:
    [(status, body)] = ask(llama_server, question("Say something", n=2))
    assert status == 200
    assert sorted(choice["index"] for choice in body["choices"]) == [0, 1]
    assert all(choice["message"]["content"] for choice in body["choices"])


def test_logprobs_come_with_each_token(llama_server: LlamaServer) -> None:
    [(status, body)] = ask(llama_server, question("Yes or no?", logprobs=True, top_logprobs=3))
    assert status == 200
    tokens = body["choices"][0]["logprobs"]["content"]
    assert len(tokens) == 8
    assert all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 3 for token in tokens)


def test_refuses_a_prompt_beyond_its_context(llama_server: LlamaServer) -> None:
    [(status, body)] = ask(llama_server, question("x " * TOKENS_PER_SLOT))
    assert status == 400
    assert body["error"]["type"] == "exceed_context_size_error"


def test_answers_more_connections_than_it_has_slots(llama_server: LlamaServer) -> None:
    answers = ask(llama_server, *(question(f"Number {i}?", max_tokens=2) for i in range(256)))
    assert [status for status, _ in answers] == [200] * 256


def test_a_key_is_asked_for_and_the_process_ends_cleanly(llama_requirements: None) -> None:
    with LlamaServer(api_keys=["right"]) as server:
        [(with_key, _)] = ask(server, question("Hello"), api_key="right")
        [(without_key, body)] = ask(server, question("Hello"))
        [(wrong_key, _)] = ask(server, question("Hello"), api_key="wrong")
    assert (with_key, without_key, wrong_key) == (200, 401, 401)
    assert body["error"]["type"] == "authentication_error"
    assert server.returncode == 0
