"""Pictures from a row to the server, through the transform: the reported cases of reading and sending them."""

from __future__ import annotations

import base64
import copy
import json
import os
import pickle
import resource
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from beam_llm.body import Body
from beam_llm.config import ChatConfig
from beam_llm.encode_images import EncodeImages
from beam_llm.errors import ErrorKind
from beam_llm.images import ImagePolicy
from beam_llm.records import ChatRequest, FailedRequest
from tests.endpoint import ScriptedEndpoint, answer
from tests.pipelines import config, refuse
from tests.replies import through_beam
from tests.test_image_loading import Handler, image_server


def pictures(*references: Any, name: str | None = None) -> ChatRequest:
    """A row that asks about pictures."""
    parts = [{"type": "image", "value": reference} for reference in references]
    return ChatRequest(name or str(references[0]), {"messages": [*parts, {"type": "text", "value": "what is it?"}]})


def urls(body: dict[str, Any]) -> list[str]:
    """The image URLs of a body."""
    return [p["image_url"]["url"] for p in body["messages"][-1]["content"] if p["type"] == "image_url"]


def sent_picture(body: dict[str, Any]) -> Image.Image:
    """The one picture of a body, decoded."""
    [url] = urls(body)
    return Image.open(BytesIO(base64.b64decode(url.partition(",")[2])))


def saved(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


RED = saved(Image.new("RGB", (8, 6), "red"))


@pytest.fixture
def red(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    path.write_bytes(RED)
    return path


async def good(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return answer()


def test_more_pictures_than_a_server_takes_fail_their_row_once_in_the_servers_words(red: Path) -> None:
    """C11: vLLM's older, flat form of an error."""

    async def one_at_most(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(urls(body)) < 2:
            return answer()
        flat = {"object": "error", "message": "At most 1 image(s) may be provided", "type": "BadRequestError"}
        return web.json_response({**flat, "param": None, "code": 400}, status=400)

    with ScriptedEndpoint(one_at_most) as endpoint:
        rows = [pictures(red, name="one"), pictures(red, red, name="two")]
        ran = through_beam(config(endpoint), rows)
        assert len(endpoint.requests) == 2
    assert set(ran.completed) == {"one"}
    failed = ran.failed["two"]
    assert (failed.kind, failed.message) == (ErrorKind.INVALID_REQUEST, "At most 1 image(s) may be provided")


def test_a_bomb_among_good_pictures_is_one_failure_with_its_path_and_size(red: Path, tmp_path: Path) -> None:
    """C77: 20,000 x 20,000 pixels in a file of some kilobytes, which is never decoded; the limit can be set."""
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png", compress_level=1)
    rows = [pictures(red, name=f"good {n}") for n in range(9)]
    with ScriptedEndpoint(good) as endpoint:
        ran = through_beam(config(endpoint), [*rows, pictures(tmp_path / "bomb.png", name="bomb")])
        tight = config(endpoint, images=ImagePolicy(max_decode_pixels=40))
        refused = through_beam(tight, [pictures(red, name="small")]).failed["small"]
    assert sorted(ran.completed) == [f"good {n}" for n in range(9)]
    failed = ran.failed["bomb"]
    assert (failed.kind, failed.attempts) == (ErrorKind.BAD_IMAGE, 0)
    assert f"{tmp_path / 'bomb.png'} is 20000x20000" in failed.message
    assert "is 8x6, more than max_decode_pixels (40)" in refused.message


def test_a_picture_too_small_for_its_server_costs_bounded_tries_or_is_scaled_up(tmp_path: Path) -> None:
    """C81: the server answers 500 for sides under 28, whatever is asked."""

    async def at_least_28(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return answer() if min(sent_picture(body).size) >= 28 else refuse(500, "internal error")

    sizes = [(26, 28), (1, 1), (300, 10)]
    for size in sizes:
        Image.new("RGB", size, "red").save(tmp_path / f"{size[0]}.png")
    rows = [pictures(tmp_path / f"{size[0]}.png", name=str(size[0])) for size in sizes]
    with ScriptedEndpoint(at_least_28) as endpoint:
        plain = through_beam(config(endpoint), rows)
        grown = through_beam(config(endpoint, images=ImagePolicy(min_side=28)), rows)
    assert {name: failed.attempts for name, failed in plain.failed.items()} == {"26": 4, "1": 4, "300": 4}
    assert set(grown.completed) == {"26", "1", "300"}


def test_thousands_of_pictures_leave_no_file_open(red: Path, tmp_path: Path) -> None:
    """C82: 2,000 under a limit of a few dozen, broken ones and opened PIL images among them."""
    (tmp_path / "cut.png").write_bytes(RED[:40])
    encode = EncodeImages(ChatConfig(("http://localhost:1/v1",), model="m"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    encode([pictures(red)])  # whatever opens files once does so now
    before = len(os.listdir("/proc/self/fd"))
    kinds = (red, tmp_path / "cut.png", tmp_path / "none.png", {"path": str(red)})
    made: list[Any] = []
    try:
        # 16 threads read at the same time; numbers of descriptors, not their count, must stay below the limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 32, hard))
        for start in range(0, 2000, 50):
            made += encode([pictures(kinds[n % 4], name=str(n)) for n in range(start, start + 50)])
            with Image.open(red) as lazy:
                made += encode([pictures(lazy)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) <= before
    assert sum(isinstance(prepared, FailedRequest) for prepared in made) == 1000
    assert len(made) == 2040


def test_a_body_too_large_for_a_gateway_is_sent_once_and_its_size_is_named(tmp_path: Path) -> None:
    """C83: 413 with HTML above 1 MB; a limit on the bytes of a picture makes room for six."""

    async def gateway(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if (request.content_length or 0) > 1_000_000:
            return web.Response(status=413, text="<html><h1>413 Too Large</h1></html>", content_type="text/html")
        return answer()

    Image.effect_noise((640, 480), 90).convert("RGB").save(tmp_path / "noise.jpg", quality=90)
    rows = [pictures(*[tmp_path / "noise.jpg"] * count, name=str(count)) for count in (1, 6)]
    with ScriptedEndpoint(gateway) as endpoint:
        ran = through_beam(config(endpoint), rows)
        assert len(endpoint.requests) == 2
        small = through_beam(config(endpoint, images=ImagePolicy(max_bytes=100_000)), rows)
    assert set(ran.completed) == {"1"}
    failed = ran.failed["6"]
    assert (failed.kind, failed.attempts, failed.status_code) == (ErrorKind.TOO_LARGE, 1, 413)
    assert failed.request_bytes > 1_000_000
    assert failed.message == f"a body of {failed.request_bytes:,} bytes: 413 Too Large"
    assert set(small.completed) == {"1", "6"}


def test_a_row_can_make_no_worker_give_away_what_it_may_read(red: Path, tmp_path: Path) -> None:
    """C86: files outside the root, what is no picture, and private addresses never reach the model's server."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "ok.png").write_bytes(RED)
    (tmp_path / "root" / "secret.txt").write_text("password: hunter2")
    with image_server(lambda request: request.reply(200, RED)) as private:
        references = {
            "file URL": red.as_uri(),
            "parent": "../red.png",
            "absolute": str(red),
            "text": "secret.txt",
            "loopback": f"{private.url}/a.png",
            "metadata": "http://169.254.169.254/latest/meta-data",
        }
        rows = [pictures(reference, name=name) for name, reference in references.items()]
        policy = ImagePolicy(root=str(tmp_path / "root"), fetch_images=True)
        with ScriptedEndpoint(good) as endpoint:
            ran = through_beam(config(endpoint, images=policy), [*rows, pictures("ok.png")])
            assert len(endpoint.requests) == 1
        assert private.paths == []
    assert set(ran.completed) == {"ok.png"}
    assert {failed.kind for failed in ran.failed.values()} == {ErrorKind.BAD_IMAGE}
    reasons = {name: failed.message for name, failed in ran.failed.items()}
    assert all("is outside the root" in reasons[name] for name in ("file URL", "parent", "absolute"))
    assert "is no picture" in reasons["text"]
    assert all("private address" in reasons[name] for name in ("loopback", "metadata"))
    assert "hunter2" not in json.dumps(reasons)


def test_one_picture_is_sent_as_the_same_pixels_whichever_way_it_is_given(tmp_path: Path) -> None:
    """C87: turned by its Exif and half transparent, as path, bytes, URL, data URL, PIL object and Parquet struct."""
    image = Image.linear_gradient("L").resize((40, 20)).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").rotate(90).resize((40, 20)))
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(image, exif=exif)
    (tmp_path / "a.png").write_bytes(data)
    loaded = Image.open(BytesIO(data))
    loaded.load()
    policy = ImagePolicy(fetch_images=True, allow_private_addresses=True)
    with image_server(lambda request: request.reply(200, data)) as host, ScriptedEndpoint(good) as endpoint:
        kinds = {
            "path": tmp_path / "a.png",
            "bytes": data,
            "URL": host.url,
            "data URL": f"data:image/png;base64,{base64.b64encode(data).decode()}",
            "opened": Image.open(BytesIO(data)),
            "loaded": loaded,
            "struct": {"bytes": data, "path": None},
        }
        ran = through_beam(config(endpoint, images=policy), [pictures(kind, name=name) for name, kind in kinds.items()])
        sent = {url for body in endpoint.requests for url in urls(body)}
        picture = sent_picture(endpoint.requests[0])
    assert len(ran.completed) == len(kinds)
    assert len(sent) == 1, "the same bytes, so that a response store treats them alike too"
    assert (picture.size, picture.mode) == ((20, 40), "RGB")


def test_a_picture_whose_host_fails_for_a_moment_costs_one_request_to_the_model() -> None:
    """C90: 503, then a reset, then the picture."""

    def shaky(request: Handler) -> None:
        if len(request.server.paths) == 1:
            request.reply(503)
        elif len(request.server.paths) == 2:
            request.connection.shutdown(2)
        else:
            request.reply(200, RED)

    policy = ImagePolicy(fetch_images=True, allow_private_addresses=True)
    with image_server(shaky) as host, ScriptedEndpoint(good) as endpoint:
        ran = through_beam(config(endpoint, images=policy), [pictures(host.url, name="q")])
        assert len(host.paths) == 3
        assert sent_picture(endpoint.requests[0]).size == (8, 6)
        assert len(endpoint.requests) == 1
    assert ran.completed["q"].attempts == 1


UNPICKLED: list[int] = []


def unpickled(data: bytes) -> Body:
    """What a body is made of again on the other side of a boundary between stages."""
    UNPICKLED.append(len(data))
    return Body(data)


def test_no_encoded_picture_crosses_a_boundary_between_stages_or_is_in_a_record(
    red: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C64: rows there hold paths. (Beam pickles some elements within a stage too, to learn their sizes.)"""
    monkeypatch.setattr(Body, "__reduce_ex__", lambda body, _protocol: (unpickled, (body.data,)))
    Image.effect_noise((300, 300), 90).save(red)
    with ScriptedEndpoint(good) as endpoint:
        ran = through_beam(config(endpoint), [pictures(red, name=str(n)) for n in range(20)])
        assert min(len(urls(body)[0]) for body in endpoint.requests) > 50_000
    assert UNPICKLED == []
    assert max(len(pickle.dumps(completion)) for completion in ran.completed.values()) < 2000
    copy.copy(Body(b"{}"))  # by way of the same method
    assert UNPICKLED == [2], "what is unpickled would not be noticed"
