"""Files that were cut off are refused in every format that marks its end, however little is missing."""

from __future__ import annotations

import struct
from io import BytesIO

import PIL
import pytest
from PIL import Image

from beam_llm.errors import ErrorKind, RequestError
from beam_llm.images import ImagePolicy, encode_image
from beam_llm.images.wholeness import is_cut_off

PLAIN = ImagePolicy()


def picture(mode: str = "RGB") -> Image.Image:
    return Image.linear_gradient("L").resize((40, 30)).convert(mode)


def saved(image: Image.Image, image_format: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def animation(image_format: str) -> bytes:
    return saved(picture(), image_format, save_all=True, append_images=[picture().rotate(90)])


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(picture(), "JPEG", exif=exif)


def tiff_with_a_late_value() -> bytes:
    """The resolution stands at the end; Pillow forgets it if that is gone, and all later tags: here, what alpha is."""
    translucent = picture("RGBA")
    translucent.putalpha(picture("L").rotate(90))
    data = bytearray(saved(translucent, "TIFF", compression="tiff_lzw", dpi=(72, 72)))
    (directory,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, directory)
    [entry] = [at for at in range(directory + 2, directory + 2 + 12 * count, 12) if data[at : at + 2] == b"\x1b\x01"]
    data[entry + 8 : entry + 12] = struct.pack("<I", len(data))
    return bytes(data) + struct.pack("<II", 72, 1)


WITH_AN_END = {
    "JPEG": saved(picture(), "JPEG"),
    "progressive JPEG": saved(picture(), "JPEG", progressive=True),
    "JPEG to be turned": turned(),
    "PNG": saved(picture(), "PNG"),
    "PNG with alpha": saved(picture("RGBA"), "PNG"),
    "animated PNG": animation("PNG"),
    "GIF": saved(picture(), "GIF"),
    "animated GIF": animation("GIF"),
    "WebP": saved(picture(), "WEBP"),
    "animated WebP": animation("WEBP"),
    "AVIF": saved(picture(), "AVIF"),
    "JPEG 2000": saved(picture(), "JPEG2000"),
    "JPEG 2000 without boxes": saved(picture(), "JPEG2000", no_jp2=True),
    "PCX with a palette": saved(picture("P"), "PCX"),
    "TIFF": tiff_with_a_late_value(),
}


@pytest.mark.parametrize("missing", [1, 2, 3, 5, 12, 40, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", WITH_AN_END)
def test_whole_file_is_sent_and_a_part_of_it_refused(kind: str, missing: float) -> None:
    """C78."""
    data = WITH_AN_END[kind]
    assert encode_image(data, PLAIN).data
    part = data[: -int(missing)] if missing >= 1 else data[: int(len(data) * (1 - missing))]
    with pytest.raises(RequestError) as caught:
        encode_image(part, PLAIN, "image a.x")
    assert caught.value.kind is ErrorKind.BAD_IMAGE
    assert caught.value.message.startswith("image a.x ")


def test_reason_says_that_the_end_is_missing() -> None:
    data = WITH_AN_END["PNG"][:-12]
    with pytest.raises(RequestError, match=f"is cut off: {len(data)} bytes, and the end of the PNG file is not among"):
        encode_image(data, PLAIN)


@pytest.mark.parametrize("kind", [kind for kind in WITH_AN_END if kind != "PCX with a palette"])
def test_bytes_behind_the_end_do_no_harm(kind: str) -> None:
    assert encode_image(WITH_AN_END[kind] + b"\0\0", PLAIN).data


def test_junk_between_the_blocks_of_a_gif_is_skipped() -> None:
    data = WITH_AN_END["GIF"]
    assert not is_cut_off(data[:-1] + b"\0\0" + data[-1:], "GIF")
    assert is_cut_off(data[:-1] + b"\0\0", "GIF")


@pytest.mark.parametrize(("data", "is_part"), [
    (struct.pack(">I4s4s", 12, b"ftyp", b"heic"), False),
    (struct.pack(">I4s4sI4s", 12, b"ftyp", b"heic", 9, b"mdat"), True),
    (struct.pack(">I4s4sI4sQ", 12, b"ftyp", b"heic", 1, b"mdat", 16), False),
    (struct.pack(">I4s4sI4sQ", 12, b"ftyp", b"heic", 1, b"mdat", 17), True),
    (struct.pack(">I4s4sI4s", 12, b"ftyp", b"heic", 0, b"mdat") + b"up to the end", False),
    (struct.pack(">I4s4s", 12, b"ftyp", b"heic") + b"SEFT", False),
    (struct.pack(">I4s4s", 12, b"ftyp", b"heic") + b"what a phone appends", False),
])  # fmt: skip
def test_boxes_of_heic_say_where_they_end(data: bytes, is_part: bool) -> None:
    assert is_cut_off(data, "HEIF") is is_part


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("version", [42, 43])
def test_tags_of_every_kind_of_tiff_must_be_there_with_their_values(order: str, version: int) -> None:
    mark = b"II" if order == "<" else b"MM"
    if version == 42:
        data = mark + struct.pack(order + "HIHHHII", 42, 8, 1, 258, 3, 4, 26) + b"\0\0\0\0" + b"\x08\0" * 4
    else:
        head = struct.pack(order + "HHHQ", 43, 8, 0, 16)
        data = mark + head + struct.pack(order + "QHHQQ", 1, 258, 3, 5, 52) + b"\0" * 8 + b"\x08\0" * 5
    assert not is_cut_off(data, "TIFF")
    assert all(is_cut_off(data[:-missing], "TIFF") for missing in range(1, len(data) - 8))


def test_grey_pcx_needs_no_palette() -> None:
    data = bytearray(saved(picture("L"), "PCX"))
    data[68] = 2
    assert not is_cut_off(bytes(data[:-769]), "PCX")


def test_bitmap_that_this_pillow_would_garble_is_refused() -> None:
    """Three pixels given one by one, as four-bit numbers: two bytes, of which Pillow 12 reads one."""
    runs = bytes((0, 3, 0x12, 0x30, 0, 0, 0, 1))
    header = struct.pack("<IiiHHIIiiII", 40, 3, 1, 1, 4, 2, len(runs), 0, 0, 16, 0)
    palette = b"".join(bytes((value, value, value, 0)) for value in range(16))
    start = 14 + len(header) + len(palette)
    data = struct.pack("<2sIHHI", b"BM", start + len(runs), 0, 0, start) + header + palette + runs
    if int(PIL.__version__.split(".")[0]) < 13:
        with pytest.raises(RequestError, match=r"needs `pip install 'Pillow>=13'`"):
            encode_image(data, PLAIN)
        return
    image = Image.open(BytesIO(encode_image(data, PLAIN).data)).convert("L")
    assert list(image.tobytes()) == [1, 2, 3]
