from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from beam_llm.errors import ErrorKind, RequestError
from beam_llm.formats.common_row import parse_object
from beam_llm.formats.openai_batch import request_of_line, write_outcome
from beam_llm.images import ImagePolicy
from beam_llm.images.encoder import ImageEncoder
from beam_llm.messages import image_references
from beam_llm.records import ChatRequest, Completion, FailedRequest, Origin
from beam_llm.spool import RestorePictures, Spool, SpooledPicture, spool_prompts

POLICY = ImagePolicy()


def gradient(mode: str = "RGB") -> Image.Image:
    return Image.linear_gradient("L").resize((24, 16)).convert(mode)


def saved(image: Image.Image, image_format: str, **settings: Any) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, image_format, **settings)
    file.seek(0)
    return file


def opened(image_format: str, mode: str = "RGB", *, load: bool = False, **settings: Any) -> Image.Image:
    image = Image.open(saved(gradient(mode), image_format, **settings))
    if load:
        image.load()
    return image


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def half_transparent_palette() -> Image.Image:
    image = gradient("P")
    image.putpalette([value for n in range(256) for value in (n, 255 - n, 7, n)], "RGBA")
    return image


def of_a_class_of_the_callers_own() -> Image.Image:
    class Own(Image.Image):
        """Not importable by a worker."""

    image = gradient()
    image.__class__ = Own
    return image


def second_frame() -> Image.Image:
    file = saved(gradient("L"), "GIF", save_all=True, append_images=[gradient("L").rotate(180)])
    image = Image.open(file)
    image.seek(1)
    return image


def restored(spool: Spool) -> dict[str, list[Any]]:
    """custom_id -> the image references of its request, as a worker gets them."""
    restore = RestorePictures(spool.folder)
    found = {}
    for path in spool.folder.glob("prompts-*.jsonl"):
        for line in path.read_bytes().splitlines():
            request = restore(request_of_line(parse_object(line), Origin(str(path), 0)))
            assert isinstance(request, ChatRequest)
            found[request.custom_id] = image_references(request.body["messages"])
    return found


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(gradient, id="RGB"),
        pytest.param(lambda: gradient("L"), id="L"),
        pytest.param(lambda: gradient("1"), id="1"),
        pytest.param(lambda: gradient("LA"), id="LA"),
        pytest.param(lambda: gradient("P"), id="P"),
        pytest.param(half_transparent_palette, id="P with alpha"),
        pytest.param(lambda: gradient("RGBA"), id="RGBA"),
        pytest.param(lambda: gradient("CMYK"), id="CMYK"),
        pytest.param(lambda: gradient("I;16"), id="I;16"),
        pytest.param(lambda: gradient("F"), id="F"),
        pytest.param(lambda: opened("JPEG"), id="JPEG, not loaded"),
        pytest.param(lambda: opened("JPEG", load=True), id="JPEG, loaded"),
        pytest.param(lambda: opened("JPEG", load=True, exif=turned()), id="JPEG, loaded, to be turned"),
        pytest.param(lambda: opened("PNG", "P", load=True, transparency=3), id="PNG, loaded, transparent colour"),
        pytest.param(lambda: opened("WEBP"), id="WebP, not loaded"),
        pytest.param(lambda: opened("TIFF", "CMYK", load=True), id="TIFF, loaded"),
        pytest.param(of_a_class_of_the_callers_own, id="a class of the caller's own"),
        pytest.param(second_frame, id="GIF, second frame"),
    ],
)
def test_a_picture_is_sent_as_it_would_be_without_the_spool(tmp_path: Path, make: Callable[[], Image.Image]) -> None:
    spool = spool_prompts([[make(), "text"]], tmp_path)
    assert spool.refused == {}
    assert ImageEncoder(POLICY).url(restored(spool)["0"][0]) == ImageEncoder(POLICY).url(make())


def test_an_opened_picture_is_spooled_as_its_file_and_left_unread(tmp_path: Path) -> None:
    picture = opened("JPEG")
    data = saved(gradient(), "JPEG").getvalue()
    spool = spool_prompts([[picture]], tmp_path)
    (reference,) = restored(spool)["0"]
    assert reference.load() == data
    assert getattr(picture, "tile", None), "the caller's picture was decoded"


def test_a_picture_that_prompts_share_is_written_once(tmp_path: Path) -> None:
    shared = Image.new("RGB", (100, 100))
    spool = spool_prompts([[shared, shared, str(n)] for n in range(50)], tmp_path)
    assert (tmp_path / "pictures").stat().st_size < 2 * 100 * 100 * 3
    assert {reference.offset for references in restored(spool).values() for reference in references} == {0}


def test_pictures_that_are_made_while_a_list_is_read_are_told_apart(tmp_path: Path) -> None:
    class Lazy(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([Image.new("L", (1, 1), self[0])])  # gone at once, so that the next may have its address

    spool = spool_prompts([Lazy([shade]) for shade in range(100)], tmp_path)
    shades = {int(index): references[0].load().getpixel((0, 0)) for index, references in restored(spool).items()}
    assert shades == {n: n for n in range(100)}


def test_no_picture_is_in_the_lines_and_none_in_a_request_in_flight(tmp_path: Path) -> None:
    url = "data:image/png;base64," + "A" * 100_000
    prompts: list[Any] = [[b"x" * 100_000], [bytearray(100_000)], [{"type": "image", "value": url}]]
    spool = spool_prompts(prompts, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.glob("prompts-*")) < 1000
    references = restored(spool)
    assert all(isinstance(one, SpooledPicture) for found in references.values() for one in found)
    assert [references[index][0].load() for index in "012"] == [b"x" * 100_000, bytes(100_000), url]


def test_what_cannot_be_spooled_is_refused_by_its_index_and_the_others_are_written(tmp_path: Path) -> None:
    cut = Image.open(io.BytesIO(saved(gradient(), "PNG").getvalue()))
    assert cut.fp is not None
    cut.fp.close()
    unknown = {"type": "image", "value": {"bytes": {"no": "bytes"}}}
    spool = spool_prompts(["first", [], [cut], [{"type": "audio", "value": b"x"}], [unknown], "last"], tmp_path)
    assert (spool.prompts, spool.written) == (6, 2)
    assert {index: error.kind for index, error in spool.refused.items()} == {
        1: ErrorKind.BAD_INPUT,
        2: ErrorKind.BAD_IMAGE,
        3: ErrorKind.BAD_INPUT,
        4: ErrorKind.BAD_IMAGE,
    }
    assert sorted(restored(spool)) == ["0", "5"]


def test_prompts_are_dealt_out_evenly(tmp_path: Path) -> None:
    spool_prompts((str(n) for n in range(640)), tmp_path)
    assert {len(path.read_bytes().splitlines()) for path in tmp_path.glob("prompts-*")} == {10}


def test_a_picture_that_cannot_be_read_back_fails_its_request_only(tmp_path: Path) -> None:
    (tmp_path / "pictures").write_bytes(b"not a pickle")
    for name in ("pictures", "missing"):
        with pytest.raises(RequestError, match="image in the spool cannot be read back") as raised:
            ImageEncoder(POLICY).url(SpooledPicture(str(tmp_path / name), 0))
        assert raised.value.kind is ErrorKind.BAD_IMAGE


def test_a_request_that_has_failed_passes_through(tmp_path: Path) -> None:
    failed = FailedRequest("0", ErrorKind.BAD_INPUT, "why")
    assert RestorePictures(tmp_path)(failed) is failed


def test_outcomes_are_read_back_by_index(tmp_path: Path) -> None:
    completion = Completion("3", {"choices": [{"message": {"content": "yes"}}]})
    failed = FailedRequest("12", ErrorKind.TIMEOUT, "too slow")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "completed-0.jsonl").write_bytes(write_outcome(completion) + b"\n")
    (tmp_path / "results" / "failed-0.jsonl").write_bytes(write_outcome(failed) + b"\n")
    assert dict(Spool(tmp_path, 20).outcomes()) == {3: completion, 12: failed}
