"""Every kind of image reference is read, or refused by name and with a reason; downloads run on a real server."""

from __future__ import annotations

import base64
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from beam_llm.errors import ErrorKind, RequestError
from beam_llm.images import ImagePolicy
from beam_llm.images.encoder import ImageEncoder
from beam_llm.images.fetch import TransientReadError, is_private, with_retries
from beam_llm.images.loading import describe_reference, load_image
from beam_llm.version import __version__

PLAIN = ImagePolicy()
FETCH = ImagePolicy(fetch_images=True, allow_private_addresses=True, download_timeout_s=5)


def png(colour: str = "red") -> bytes:
    file = BytesIO()
    Image.new("RGB", (8, 6), colour).save(file, "PNG")
    return file.getvalue()


PICTURE = png()
BASE64 = base64.b64encode(PICTURE).decode()


def load(reference: Any, policy: ImagePolicy = PLAIN) -> bytes | Image.Image | str:
    """`load_image` without waits between tries."""
    return load_image(reference, policy, sleep=lambda _: None)


def refusal(reference: Any, policy: ImagePolicy = PLAIN) -> str:
    with pytest.raises(RequestError) as caught:
        load(reference, policy)
    assert caught.value.kind is ErrorKind.BAD_IMAGE
    assert len(caught.value.message) < 700
    return caught.value.message


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a picture%20#1.JPG"
    path.write_bytes(PICTURE)
    return path


def test_every_local_reference_gives_the_files_bytes(picture: Path) -> None:
    for reference in (
        str(picture),
        picture,
        picture.as_uri(),
        picture.as_uri().replace("file://", "file://localhost"),
        PICTURE,
        bytearray(PICTURE),
        memoryview(PICTURE),
        f"data:image/jpeg;base64,{BASE64}",
        {"bytes": PICTURE, "path": "elsewhere.png"},
        {"bytes": None, "path": str(picture)},
        {"path": str(picture)},
    ):
        assert load(reference) == PICTURE


def test_pil_images_and_urls_are_handed_through() -> None:
    image = Image.new("RGB", (2, 2))
    assert load(image) is image
    url = "HTTPS://user@host/a%2Fb c.jpg?sig=x%2By%3D#f"
    assert load(url) is url


@pytest.mark.parametrize("url", [
    f"DATA:image/png;charset=x;BASE64,{BASE64}",
    f"data:;base64,{BASE64.rstrip('=')}",
    f"data:image/png;base64, {BASE64[:20]}\r\n {BASE64[20:]}\n",
    f"data:image/png;base64,{BASE64.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
    f"data:image/png;base64,{BASE64.replace('+', '-').replace('/', '_')}",
])  # fmt: skip
def test_data_urls_are_read_tolerantly(url: str) -> None:
    assert load(url) == PICTURE


@pytest.mark.parametrize(("reference", "reason"), [
    ("data:image/png;base64", "without `;base64,`"),
    ("data:image/svg+xml,%3Csvg", "without `;base64,`"),
    ("data:image/png;base64,SECRET*SECRET!", "is not base64"),
    ("data:image/png;base64,SECRETé", "is not base64"),
    ("data:image/png;base64,", "is empty"),
    (b"", "is empty"),
    ({}, "neither `bytes` nor `path`"),
    ({"bytes": b"", "path": ""}, "neither `bytes` nor `path`"),
    (None, "type NoneType is no image reference"),
    (17, "type int is no image reference"),
    ("", "is no image reference"),
    ("ftp://host/a.png", "'ftp'"),
    ("javascript://a", "'javascript'"),
    ("file://other-host/a.png", "another host"),
    ("/nowhere/a.png", "/nowhere/a.png does not exist"),
    ("/nowhere/\0.png", "is no path"),
    ("/nowhere/\ud800.png", "is no path|does not exist"),
    ("a" * 5000, "File name too long"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(reference: Any, reason: str) -> None:
    message = refusal(reference)
    assert re.search(reason, message), message
    assert message.startswith("image ")
    assert "SECRET" not in message


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    assert "is a folder" in refusal(tmp_path)
    assert "is empty" in refusal(tmp_path / "empty")
    assert "no regular file" in refusal(tmp_path / "pipe")
    assert "no regular file" in refusal("/dev/zero")
    (tmp_path / "big").write_bytes(b"x" * 101)
    for reference in (tmp_path / "big", "data:;base64," + "eHh4" * 50):
        assert "max_download_bytes" in refusal(reference, ImagePolicy(max_download_bytes=100))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_refused(picture: Path) -> None:
    picture.chmod(0)
    assert "may not be read" in refusal(picture)


def test_root_confines_paths_and_resolves_links(tmp_path: Path) -> None:
    """C86."""
    root, outside = tmp_path / "root", tmp_path / "root-too"
    for folder in (root / "sub", outside):
        folder.mkdir(parents=True)
        (folder / "a.png").write_bytes(PICTURE)
    (root / "inner").symlink_to(root / "sub" / "a.png")
    (root / "outer").symlink_to(outside / "a.png")
    policy = ImagePolicy(root=str(root))
    inside = root / "sub" / "a.png"
    for reference in (
        "sub/a.png",
        "sub/../sub/a.png",
        str(inside),
        inside,
        inside.as_uri(),
        "inner",
        {"path": "inner"},
    ):
        assert load(reference, policy) == PICTURE
    out = outside / "a.png"
    for reference in ("../root-too/a.png", str(out), out, out.as_uri(), "outer", {"path": "/etc/hostname"}, "gs://b/a"):
        assert f"is outside the root {root}" in refusal(reference, policy)


class ImageServer(ThreadingHTTPServer):
    """Answers by a function of the request; remembers every raw request line and user agent."""

    daemon_threads = True

    def __init__(self, answer: Callable[[Handler], None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.paths: list[str] = []
        self.agents: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: ImageServer

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.server.agents.append(self.headers["User-Agent"])
        self.server.answer(self)

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
        pass


@contextmanager
def image_server(answer: Callable[[Handler], None]) -> Iterator[ImageServer]:
    with ImageServer(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_signed_url_is_sent_as_given_also_after_a_redirect() -> None:
    """C84."""
    signed = "/a%2Fb/vc%26p%c3%a9.jpg?sig=x%2By%3D&c=me%40z"

    def answer(request: Handler) -> None:
        if request.path.startswith("/moved"):
            request.reply(int(request.path[-3:]), Location=signed)
        else:
            request.reply(200, PICTURE)

    with image_server(answer) as server:
        for path in (signed, "/moved/301", "/moved/302", "/moved/307", "/moved/308"):
            assert load(server.url + path, FETCH) == PICTURE
        assert [path for path in server.paths if "moved" not in path] == [signed] * 5
        assert load(f"{server.url}/ä b.png", FETCH) == PICTURE
        assert server.paths[-1] == "/%C3%A4%20b.png"


def test_user_agent_names_the_tool_and_can_be_set() -> None:
    """C85."""
    with image_server(lambda request: request.reply(200, PICTURE)) as server:
        load(server.url, FETCH)
        load(server.url, replace(FETCH, user_agent="tool/2 (me@example.com)"))
        assert server.agents == [f"beam_llm/{__version__}", "tool/2 (me@example.com)"]


def test_passing_trouble_of_an_image_host_is_tried_again() -> None:
    """C90."""

    def answer(request: Handler) -> None:
        match len(request.server.paths):
            case 1:
                request.reply(503)
            case 2:
                request.connection.shutdown(2)
            case 3:
                request.reply(200, PICTURE[:20], Content_Length=str(len(PICTURE)))
            case _:
                request.reply(200, PICTURE)

    with image_server(answer) as server:
        assert load(server.url, FETCH) == PICTURE
        assert len(server.paths) == 4


@pytest.mark.parametrize(("status", "tries"), [(403, 1), (404, 1), (410, 1), (429, 4), (500, 4), (503, 4)])
def test_http_status_decides_whether_to_try_again(status: int, tries: int) -> None:
    """C85."""
    with image_server(lambda request: request.reply(status, b"no")) as server:
        message = refusal(f"{server.url}/cat.jpg?X-Signature=SECRET", FETCH)
        assert f"{server.url}/cat.jpg the server answers {status}" in message
        assert "SECRET" not in message
        assert len(server.paths) == tries


def test_download_is_bounded_in_bytes() -> None:
    def endless(request: Handler) -> None:
        request.send_response(200)
        request.end_headers()
        with suppress(OSError):
            while True:
                request.wfile.write(b"x" * 65536)

    policy = replace(FETCH, max_download_bytes=1000)
    for answer in (endless, lambda request: request.reply(200, b"x" * 1001)):
        with image_server(answer) as server:
            assert "is larger than max_download_bytes (1000)" in refusal(server.url, policy)
            assert len(server.paths) == 1


def test_download_is_bounded_in_time() -> None:
    done = threading.Event()

    def drip(request: Handler) -> None:
        request.send_response(200)
        request.end_headers()
        with suppress(OSError):
            while not done.wait(0.01):
                request.wfile.write(b"x")

    def stall(_: Handler) -> None:
        done.wait(5)

    for answer in (drip, stall):
        done.clear()
        with image_server(answer) as server:
            message = refusal(server.url, replace(FETCH, download_timeout_s=0.05))
            done.set()
        assert "4 tries" in message


def test_private_addresses_are_refused_before_anything_is_sent() -> None:
    """C86."""
    policy = replace(FETCH, allow_private_addresses=False)
    with image_server(lambda request: request.reply(200, PICTURE)) as server:
        port = server.server_port
        local = (f"127.0.0.1:{port}", f"localhost:{port}", f"[::ffff:127.0.0.1]:{port}", "0.0.0.0", "2130706433")
        for host in (*local, "169.254.169.254", "10.1.2.3", "[::1]", "[fd00:ec2::254]"):
            assert "private address" in refusal(f"http://{host}/latest/meta-data", policy)
        assert server.paths == []


@pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/a", "data:image/png;base64,AAAA"])
def test_redirect_to_another_scheme_is_not_followed(target: str) -> None:
    with image_server(lambda request: request.reply(302, Location=target)) as server:
        assert re.search("302|redirects to something other", refusal(server.url, FETCH))
        assert len(server.paths) == 1


def test_redirects_that_go_in_circles_end() -> None:
    with image_server(lambda request: request.reply(302, Location="/again")) as server:
        assert "302" in refusal(server.url, FETCH)
        assert len(server.paths) < 15


def test_proxy_of_the_environment_is_used_and_sees_the_raw_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """C35."""
    with image_server(lambda request: request.reply(200, PICTURE)) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "direct.invalid")
        for policy in (FETCH, replace(FETCH, allow_private_addresses=False)):  # the proxy's own address may be private
            assert load("http://pictures.invalid/a%2Fb?c=%40", policy) == PICTURE
        assert proxy.paths == ["http://pictures.invalid/a%2Fb?c=%40"] * 2
        assert "private address" in refusal("http://10.0.0.1/a", replace(FETCH, allow_private_addresses=False))
        refusal("http://direct.invalid/a", FETCH)
        assert len(proxy.paths) == 2


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "2606:4700::1111"])
def test_public_addresses_are_told_apart(address: str) -> None:
    assert not is_private(address)


@pytest.mark.parametrize("address", ["100.100.100.200", "168.63.129.16", "224.0.0.1", "fe80::1%eth0", "2002:7f00:1::"])
def test_addresses_of_the_platform_are_private(address: str) -> None:
    assert is_private(address)


def test_back_off_grows_and_is_jittered() -> None:
    waits: list[float] = []

    def fail() -> bytes:
        raise TransientReadError("down")

    with pytest.raises(RequestError, match=r"down \(4 tries\)"):
        with_retries(fail, sleep=waits.append, rng=lambda: 0.5)
    assert waits == [0.25, 0.5, 1.0]


@pytest.mark.parametrize(("reference", "shown"), [
    ("gs://bucket/cat.jpg", "gs://bucket/cat.jpg"),
    ("https://me:pw@host/a.jpg?sig=1#x", "https://host/a.jpg"),
    ("https://host?sig=1@x/y", "https://host"),
    ("data:image/png;base64,AAAA", "data:image/png;base64,…"),
    ("/data/what?.jpg", "/data/what?.jpg"),
    (b"abc", "in bytes (3)"),
    ({"bytes": b"abc", "path": "cat.jpg"}, "cat.jpg"),
    (Image.new("L", (3, 2)), "in memory (L 3x2)"),
])  # fmt: skip
def test_description_shows_no_data_and_no_secrets(reference: Any, shown: str) -> None:
    assert describe_reference(reference) == shown


def test_description_is_short() -> None:
    assert len(describe_reference("/a" * 1000 + ".jpg")) <= 200
    assert describe_reference("/a" * 1000 + ".jpg").endswith("/a.jpg")


def test_image_url_is_a_data_url_and_errors_name_the_reference(picture: Path, tmp_path: Path) -> None:
    assert str(ImageEncoder(PLAIN).url(picture)) == f"data:image/png;base64,{BASE64}"
    assert ImageEncoder(PLAIN).url("https://host/a.png") == "https://host/a.png"
    text = tmp_path / "secret.jpg"
    text.write_text("root:x:0:0")
    with pytest.raises(RequestError, match=rf"^image {text} is no picture"):
        ImageEncoder(PLAIN).url(text)


def test_many_threads_load_side_by_side_without_leaving_files_open(picture: Path, tmp_path: Path) -> None:
    """C82."""
    (tmp_path / "cut.png").write_bytes(PICTURE[:30])
    before = len(os.listdir("/proc/self/fd"))

    def attempt(number: int) -> bool:
        try:
            reference = (picture, tmp_path / "cut.png", tmp_path / "none", tmp_path)[number % 4]
            return bool(ImageEncoder(PLAIN).url(reference))
        except RequestError:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(400))) == 100
    assert len(os.listdir("/proc/self/fd")) <= before + 1
