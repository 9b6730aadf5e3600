"""Pictures that recur are made once; what is kept has a limit; relative paths find their files."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from beam_llm.encode_images import picture_weight
from beam_llm.errors import ErrorKind, RequestError
from beam_llm.images import DataURL, ImagePolicy
from beam_llm.images.encoder import ImageEncoder, RecentURLs
from beam_llm.images.loading import locate
from tests.test_image_loading import Handler, image_server


def url(size: int) -> DataURL:
    return DataURL(b"", b"x" * size)


def bmp(shade: int = 0) -> bytes:
    """A picture that has to be decoded."""
    buffer = BytesIO()
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(buffer, "BMP")
    return buffer.getvalue()


def test_pictures_have_to_be_waited_for_while_they_come_slowly(tmp_path: Path) -> None:
    """From a bucket that is mounted as a folder, say: then each is loaded on a thread of its own."""
    path = tmp_path / "a.bmp"
    path.write_bytes(bmp())

    def slowly(handler: Handler) -> None:
        time.sleep(0.03)
        handler.reply(200, bmp())

    encoder = ImageEncoder(ImagePolicy(fetch_images=True, allow_private_addresses=True, cache_bytes=0))
    assert all(encoder.loads_quickly(reference) for reference in (str(path), path, bmp(), "data:image/png;base64,AA=="))
    assert not any(encoder.loads_quickly(url) for url in ("gs://bucket/a.png", "https://host/a.png"))
    with image_server(slowly) as server:
        for _ in range(10):
            encoder.url(f"{server.url}/a.bmp")
    assert not encoder.loads_quickly(path)
    for _ in range(100):
        encoder.url(path)
    assert encoder.loads_quickly(path)


def test_what_was_used_last_is_kept_up_to_the_limit() -> None:
    recent, made = RecentURLs(1000), []

    def get(key: str, size: int = 300) -> None:
        def make() -> DataURL:
            made.append(key)
            return url(size)

        assert len(recent.get(key, make)) == size

    for key in "abcabcada":
        get(key)
    assert made == ["a", "b", "c", "d"], "d has put b out, which was used longest ago"
    get("b")
    get("large", 1001)
    get("large", 1001)
    get("b")
    assert made[4:] == ["b", "large", "large"], "what is larger than the limit puts nothing out"


def test_many_who_ask_for_one_picture_at_once_wait_for_one_that_makes_it() -> None:
    recent, made, begun = RecentURLs(1000), [], threading.Barrier(8)

    def ask(_: int) -> DataURL:
        begun.wait()
        return recent.get("key", make)

    def make() -> DataURL:
        made.append(threading.get_ident())
        time.sleep(0.05)
        return url(10)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, range(8)))
    assert len(made) == 1
    assert all(one is found[0] for one in found)


def test_a_failure_reaches_everyone_who_waits_and_is_not_kept() -> None:
    recent, made, begun = RecentURLs(1000), [], threading.Barrier(4)

    def make() -> DataURL:
        made.append(1)
        time.sleep(0.05)
        raise RequestError("gone", ErrorKind.BAD_IMAGE)

    def ask(_: int) -> str:
        begun.wait()
        with pytest.raises(RequestError) as raised:
            recent.get("key", make)
        return raised.value.message

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(4))) == ["gone"] * 4
    assert len(made) == 1
    assert len(recent.get("key", lambda: url(5))) == 5


def test_ten_questions_about_one_picture_decode_it_once(tmp_path: Path) -> None:
    path = tmp_path / "a.bmp"
    path.write_bytes(bmp())
    encoder = ImageEncoder(ImagePolicy())
    found = [encoder.url(str(path)) for _ in range(10)] + [
        encoder.url({"bytes": None, "path": str(path)}) for _ in "ab"
    ]
    assert all(one is found[0] for one in found)
    assert ImageEncoder(ImagePolicy(cache_bytes=0)).url(path) == found[0]


def test_a_file_that_is_written_anew_is_another_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.bmp"
    path.write_bytes(bmp(1))
    encoder = ImageEncoder(ImagePolicy())
    first = encoder.url(path)
    path.write_bytes(bmp(2))
    os.utime(path, ns=(1, 1))
    assert encoder.url(path) != first


def test_a_picture_of_the_web_is_downloaded_once() -> None:
    with image_server(lambda handler: handler.reply(200, bmp())) as server:
        encoder = ImageEncoder(ImagePolicy(fetch_images=True, allow_private_addresses=True))
        assert len({encoder.url(f"{server.url}/a.bmp?x={i % 2}") for i in range(10)}) == 1
        assert encoder.url({"path": f"{server.url}/a.bmp?x=0"}) == encoder.url(f"{server.url}/a.bmp?x=0")
    assert sorted(server.paths) == ["/a.bmp?x=0", "/a.bmp?x=1"]
    assert ImageEncoder(ImagePolicy()).url({"path": "HTTPS://h/a.png"}) == "HTTPS://h/a.png"


def test_pictures_at_hand_are_not_kept() -> None:
    encoder = ImageEncoder(ImagePolicy())
    first, second = encoder.url(bmp()), encoder.url(bmp())
    assert first == second
    assert first is not second


@pytest.mark.parametrize(
    ("path", "root", "beside", "place"),
    [
        ("here.png", None, None, "here.png"),
        ("here.png", None, "{tmp}/data/rows.jsonl", "{tmp}/data/here.png"),
        ("only.png", None, "{tmp}/data/rows.jsonl", "only.png"),
        ("near.png", None, "{tmp}/data/rows.jsonl", "{tmp}/data/near.png"),
        ("none.png", None, "{tmp}/data/rows.jsonl", "none.png"),
        ("near.png", None, "rows.jsonl", "near.png"),
        ("img/a.png", None, "gs://bucket/data/rows.parquet", "gs://bucket/data/img/a.png"),
        ("img/a.png", "gs://other/root/", "gs://bucket/data/rows.parquet", "gs://other/root/img/a.png"),
        ("near.png", "{tmp}", "{tmp}/data/rows.jsonl", "near.png"),
        ("/abs/a.png", None, "gs://bucket/rows.jsonl", "/abs/a.png"),
    ],
)
def test_a_relative_path_starts_at_the_root_else_beside_the_file_else_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, root: str | None, beside: str | None, place: str
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "data").mkdir()
    for name in ("here/here.png", "here/only.png", "data/here.png", "data/near.png"):
        (tmp_path / name).write_bytes(bmp())
    monkeypatch.chdir(tmp_path / "here")

    def full(text: str | None) -> Any:
        return text and text.format(tmp=tmp_path)

    assert locate(path, ImagePolicy(root=full(root)), full(beside)) == full(place)


@pytest.mark.parametrize(
    ("images", "mean_bytes", "weight"),
    [(0, 1e6, 1), (1, 1e4, 1), (1, 2**18, 1), (1, 2**20, 4), (3, 2**20, 12), (1, 1e9, 128), (50, 1e3, 1)],
)
def test_a_batch_has_as_many_pictures_as_memory_takes(images: int, mean_bytes: float, weight: int) -> None:
    assert picture_weight(images, mean_bytes, batch_size=128) == weight
