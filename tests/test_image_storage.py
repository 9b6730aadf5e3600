"""Pictures are read through Beam's file systems: short reads, passing trouble, limits, and one client for gs://."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from apache_beam.io.filesystem import FileSystem
from apache_beam.io.localfilesystem import LocalFileSystem

from beam_llm.errors import RequestError
from beam_llm.images import ImagePolicy
from beam_llm.images import storage as image_storage
from beam_llm.images.loading import load_image
from tests.servers import gcs_server
from tests.test_image_loading import Handler, image_server

PLAIN = ImagePolicy()
PICTURE = b"any bytes will do here"


def load(reference: Any, policy: ImagePolicy = PLAIN) -> Any:
    """`load_image` without waits between tries."""
    return load_image(reference, policy, sleep=lambda _: None)


def refusal(reference: Any, policy: ImagePolicy = PLAIN) -> str:
    with pytest.raises(RequestError) as caught:
        load(reference, policy)
    return caught.value.message


class FlakyFileSystem(LocalFileSystem):
    """Reads `flaky://any/path` from the local `/path`; each open first raises the next scripted failure, if any."""

    failures: list[Exception] = []  # noqa: RUF012 - Beam makes a new instance for each open
    opened = 0

    @classmethod
    def scheme(cls) -> str:
        return "flaky"

    def open(self, path: str, *_: Any, **__: Any) -> Any:
        type(self).opened += 1
        if self.failures:
            raise self.failures.pop(0)
        return ShortReads(open(path.removeprefix("flaky://any"), "rb"))


class ShortReads:
    """A stream that gives at most seven bytes at a time, as a raw one may."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> ShortReads:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        data: bytes = self._file.read(min(size, 7))
        return data


class StatusError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.code = code


@pytest.fixture
def flaky(tmp_path: Path) -> Iterator[str]:
    FlakyFileSystem.opened, FlakyFileSystem.failures = 0, []
    assert FlakyFileSystem in FileSystem.get_all_subclasses()
    (tmp_path / "cat.png").write_bytes(PICTURE)
    yield f"flaky://any{tmp_path}/cat.png"
    FlakyFileSystem.failures = []


def test_transient_storage_errors_are_tried_again(flaky: str) -> None:
    """C70."""
    FlakyFileSystem.failures = [TimeoutError("slow"), StatusError(503), ConnectionResetError("gone")]
    assert load(flaky) == PICTURE
    assert FlakyFileSystem.opened == 4


@pytest.mark.parametrize("error", [FileNotFoundError("x"), StatusError(404), StatusError(403), PermissionError("x")])
def test_final_storage_errors_are_not_tried_again(flaky: str, error: Exception) -> None:
    """C70."""
    FlakyFileSystem.failures = [error]
    message = refusal(flaky)
    assert FlakyFileSystem.opened == 1
    assert ("does not exist" in message) == (isinstance(error, FileNotFoundError) or "404" in str(error))


def test_storage_that_stays_down_is_given_up_after_four_tries(flaky: str) -> None:
    FlakyFileSystem.failures = [StatusError(500 + n) for n in range(9)]
    assert "status 503" in refusal(flaky)
    assert FlakyFileSystem.opened == 4


def test_storage_object_larger_than_the_limit_is_refused(flaky: str) -> None:
    assert load(flaky, ImagePolicy(max_download_bytes=len(PICTURE))) == PICTURE
    assert "max_download_bytes" in refusal(flaky, ImagePolicy(max_download_bytes=len(PICTURE) - 1))


def test_root_may_be_a_storage_prefix(flaky: str) -> None:
    prefix, _, name = flaky.rpartition("/")
    policy = ImagePolicy(root=prefix)
    assert load(flaky, policy) == load(name, policy) == PICTURE
    for reference in (
        f"{prefix}-too/a",
        f"{prefix}/../a",
        "../a",
        "flaky://other/a",
        "/etc/hostname",
        "file:///etc/hosts",
    ):
        assert prefix in refusal(reference, policy)


@pytest.fixture
def bucket() -> Iterator[str]:
    storage = pytest.importorskip("google.cloud.storage")
    with gcs_server("pictures"):
        image_storage._cloud_storage.cache_clear()
        storage.Client(project="p").bucket("pictures").blob("a b/cat%20#1.jpg").upload_from_string(PICTURE)
        yield "gs://pictures"
        image_storage._cloud_storage.cache_clear()


def test_cloud_storage_is_read_by_many_threads_with_one_client(bucket: str) -> None:
    """C69."""
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(load, [f"{bucket}/a b/cat%20#1.jpg"] * 100)) == {PICTURE}
    assert image_storage._cloud_storage.cache_info().misses == 1
    assert load("a b/cat%20#1.jpg", ImagePolicy(root=bucket)) == PICTURE
    for missing in (f"{bucket}/none.jpg", "gs://no-such-bucket/a.jpg"):
        assert f"image {missing} does not exist" in refusal(missing)


def test_cloud_storage_reads_what_passes_trouble_hides(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C69, C70: one request an object; a 503, a wrong checksum and a body that ends early are read again."""
    good = {"X_Goog_Hash": f"crc32c={_crc32c(PICTURE)},md5=x"}
    answers: list[Callable[[Handler], None]] = [
        lambda handler: handler.reply(503, b"later"),
        lambda handler: handler.reply(200, PICTURE[:-1] + b"?", **good),
        lambda handler: handler.reply(200, PICTURE, Content_Length=str(len(PICTURE) + 9)),
        lambda handler: handler.reply(200, PICTURE, **good),
    ]
    with image_server(lambda handler: answers.pop(0)(handler)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        assert load(f"{bucket}/a b/#1?.jpg") == PICTURE
    assert server.paths == ["/download/storage/v1/b/pictures/o/a%20b%2F%231%3F.jpg?alt=media"] * 4


@pytest.mark.parametrize(
    ("status", "body", "headers", "reason"),
    [
        (404, b"No such object", {}, "does not exist"),
        (403, b"caller has no storage.objects.get access", {}, "403 caller has no storage.objects.get access"),
        (200, b"x" * 101, {}, "is larger than max_download_bytes (100)"),
        (200, gzip.compress(bytes(10_000)), {"Content_Encoding": "gzip"}, "is larger than max_download_bytes (100)"),
    ],
)
def test_an_object_of_cloud_storage_that_cannot_be_had_is_refused_at_once(
    bucket: str, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, headers: dict[str, str], reason: str
) -> None:
    with image_server(lambda handler: handler.reply(status, body, **headers)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        assert reason in refusal(f"{bucket}/a.jpg", ImagePolicy(max_download_bytes=100))
    assert len(server.paths) == 1


def test_an_object_that_is_stored_packed_is_unpacked(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(PICTURE)
    headers = {"Content_Encoding": "gzip", "X_Goog_Hash": f"crc32c={_crc32c(packed)}"}
    with image_server(lambda handler: handler.reply(200, packed, **headers)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        assert load(f"{bucket}/a.jpg") == PICTURE


def _crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
