"""What every kind of picture becomes: sent as it is, made anew, or refused with a reason."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import pickle
import random
import struct
import threading
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageDraw, PngImagePlugin

from beam_llm.errors import ConfigError, ErrorKind, RequestError
from beam_llm.images import EncodedImage, ImagePolicy, data_url, encode_image, target_size

PLAIN = ImagePolicy()
RED, WHITE = (255, 0, 0), (255, 255, 255)


def saved(image: Image.Image, image_format: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def photo(width: int = 64, height: int = 48) -> Image.Image:
    """Smooth colours with a red top edge, so that a turned picture shows."""
    image = Image.merge(
        "RGB", [Image.linear_gradient("L").resize((width, height)).rotate(90 * turn) for turn in range(3)]
    )
    ImageDraw.Draw(image).rectangle((0, 0, width, height // 6), fill=RED)
    return image


def decoded(encoded: EncodedImage) -> Image.Image:
    image = Image.open(BytesIO(encoded.data))
    image.load()
    assert Image.MIME[image.format or ""] == encoded.media_type
    assert image.size == (encoded.width, encoded.height)
    return image


def pixel(image: Image.Image, x: int, y: int) -> tuple[int, ...]:
    value = image.convert("RGB").getpixel((x, y))
    assert isinstance(value, tuple)
    return value


def is_close(colour: tuple[int, ...], wanted: tuple[int, ...], by: int = 40) -> bool:
    return all(abs(a - b) <= by for a, b in zip(colour, wanted, strict=True))


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_header(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        pytest.param(saved(photo(), "JPEG"), "image/jpeg", id="baseline"),
        pytest.param(saved(photo(), "JPEG", progressive=True), "image/jpeg", id="progressive"),
        pytest.param(saved(photo().convert("L"), "JPEG"), "image/jpeg", id="grey jpeg"),
        pytest.param(
            saved(photo(), "JPEG", icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()),
            "image/jpeg",
            id="srgb profile",
        ),
        pytest.param(saved(photo(), "PNG"), "image/png", id="png"),
        pytest.param(saved(photo().convert("L"), "PNG"), "image/png", id="grey png"),
        pytest.param(saved(Image.new("RGB", (1, 1)), "PNG"), "image/png", id="one pixel"),
    ],
)
def test_plain_file_is_sent_as_it_is(data: bytes, media_type: str) -> None:
    encoded = encode_image(data, PLAIN)
    assert encoded.data is data
    assert (encoded.media_type, encoded.converted) == (media_type, False)
    decoded(encoded)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
@pytest.mark.parametrize("progressive", [False, True])
def test_what_stands_behind_the_picture_is_not_sent(image_format: str, progressive: bool) -> None:
    data = saved(photo(), image_format, progressive=progressive)
    assert encode_image(data + b"\0ftypmp42 a film", PLAIN).data == data


def test_jpeg_with_a_byte_too_many_between_its_segments_is_made_anew() -> None:
    data = saved(photo(), "JPEG")
    first = 4 + int.from_bytes(data[4:6], "big")
    mended = encode_image(data[:first] + b"\x01" + data[first:], PLAIN)
    assert mended.converted
    assert decoded(mended).size == (64, 48)
    assert not encode_image(data[:first] + b"\xff" + data[first:], PLAIN).converted


def exif(orientation: int) -> Image.Exif:
    block = Image.Exif()
    block[0x0112] = orientation
    return block


TURNED_BACK = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_camera_orientation_is_applied(orientation: int, image_format: str) -> None:
    """C72."""
    turn = TURNED_BACK[orientation]
    stored = photo() if turn is None else photo().transpose(turn)
    data = saved(stored, image_format, exif=exif(orientation))
    for source in (data, Image.open(BytesIO(data))):
        upright = decoded(encode_image(source, PLAIN))
        assert upright.size == (64, 48)
        assert is_close(pixel(upright, 32, 1), RED)
        assert not is_close(pixel(upright, 32, 46), RED)
        assert upright.getexif().get(0x0112, 1) == 1


def test_orientation_in_xmp_is_applied() -> None:
    xmp = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", xmp)
    data = saved(photo().transpose(Image.Transpose.ROTATE_90), "PNG", pnginfo=info)
    assert decoded(encode_image(data, PLAIN)).size == (64, 48)


def test_broken_exif_counts_as_none_and_warns_nobody() -> None:
    data = saved(photo(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decoded(encode_image(data, PLAIN)).size == (64, 48)


@pytest.mark.parametrize("target", ["auto", "jpeg", "png"])
@pytest.mark.parametrize("mode", [
    "1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F",
    "I;16", "I;16B", "I;16L",
])  # fmt: skip
def test_every_mode_becomes_rgb_or_grey(mode: str, target: str) -> None:
    """C73."""
    source = Image.new("RGB", (20, 10), RED)
    via = {"La": "LA", "RGBa": "RGBA", "PA": "P", "I;16B": "I;16", "I;16L": "I;16"}.get(mode)
    if mode == "LAB":
        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        source = ImageCms.buildTransform(*profiles, "RGB", "LAB").apply(source)
    else:
        source = (source.convert("L") if mode.startswith("I;16") else source.convert(via) if via else source).convert(
            mode
        )
    assert source.mode == mode
    before = source.tobytes()
    image = decoded(encode_image(source, replace(PLAIN, format=target)))
    assert image.mode in ("RGB", "L")
    if mode in ("P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"):
        assert is_close(pixel(image, 5, 5), RED, by=6)
    assert (source.mode, source.tobytes()) == (mode, before)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_transparency_is_blended_with_the_background(mode: str) -> None:
    """C74."""
    source = Image.frombytes("L", (30, 10), random.Random(1).randbytes(300)).convert("RGBA")
    alpha = Image.new("L", source.size, 0)
    ImageDraw.Draw(alpha).rectangle((10, 0, 19, 9), fill=255)
    source.paste((0, 0, 0), (10, 0, 20, 10))
    source.putalpha(alpha)
    if mode == "P":
        palette = Image.new("P", source.size, 1)
        palette.putpalette([0, 0, 0, 9, 99, 9])
        palette.paste(0, (10, 0, 20, 10))
        source = Image.open(BytesIO(saved(palette, "PNG", transparency=1)))
    elif mode != "RGBA":
        source = source.convert(mode)
    for background in (WHITE, (0, 0, 250)):
        image = decoded(encode_image(source, replace(PLAIN, background=background)))
        assert {pixel(image, x, 5) for x in (0, 9, 20, 29)} == {background}
        assert pixel(image, 15, 5) == (0, 0, 0)


def test_half_transparent_pixels_are_mixed() -> None:
    """C74."""
    image = decoded(encode_image(Image.new("RGBA", (4, 4), (255, 0, 0, 128)), PLAIN))
    assert is_close(pixel(image, 1, 1), (255, 127, 127), by=1)


def test_transparent_colour_of_an_rgb_file_is_background() -> None:
    data = saved(Image.new("RGB", (4, 4), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    assert pixel(decoded(encode_image(data, PLAIN)), 1, 1) == WHITE


def ramp_16_bit() -> Image.Image:
    return Image.frombytes("I;16", (256, 1), struct.pack("<256H", *range(0, 65536, 257)))


@pytest.mark.parametrize("make", [
    pytest.param(lambda: saved(ramp_16_bit(), "PNG"), id="16-bit PNG"),
    pytest.param(lambda: saved(ramp_16_bit(), "TIFF"), id="16-bit TIFF"),
    pytest.param(ramp_16_bit, id="I;16"),
    pytest.param(lambda: ramp_16_bit().convert("I"), id="I"),
    pytest.param(lambda: ramp_16_bit().convert("I").convert("F"), id="F"),
    pytest.param(lambda: ramp_16_bit().convert("I").convert("F").point(lambda v: v * (1 / 65535)), id="F to 1"),
    pytest.param(lambda: ramp_16_bit().convert("I").point(lambda v: v * 100 + 7), id="I of 24 bits"),
])  # fmt: skip
def test_deep_grey_keeps_256_levels(make: Callable[[], bytes | Image.Image]) -> None:
    """C75."""
    image = decoded(encode_image(make(), PLAIN))
    assert image.mode == "L"
    assert list(image.tobytes()) == list(range(256))


def test_transparent_colour_of_a_16_bit_file_is_background() -> None:
    header = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 0, 0, 0, 0))
    rows = zlib.compress(struct.pack(">BHH", 0, 300, 0))
    data = header + png_chunk(b"tRNS", struct.pack(">H", 300)) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")
    image = decoded(encode_image(data, PLAIN))
    assert [pixel(image, x, 0) for x in (0, 1)] == [WHITE, (0, 0, 0)]


def test_grey_without_finite_values_is_refused() -> None:
    with pytest.raises(RequestError, match="no finite numbers"):
        encode_image(Image.new("F", (2, 2), float("inf")), PLAIN)


def test_cmyk_red_stays_red() -> None:
    """C76."""
    source = Image.new("RGB", (16, 16), RED).convert("CMYK")
    for data in (saved(source, "JPEG", quality=95), saved(source, "TIFF")):
        assert is_close(pixel(decoded(encode_image(data, PLAIN)), 8, 8), RED, by=6)


@pytest.mark.parametrize("new_name", ["xRGB", "sRGB"])
def test_other_profile_is_applied_and_left_out(new_name: str) -> None:
    """C76: by its name, or by primaries that are not sRGB's, as in "DCI-P3 D65 Gamut with sRGB Transfer"."""
    wide = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for name, other in ((b"sRGB", new_name.encode()), ("sRGB".encode("utf-16-be"), new_name.encode("utf-16-be"))):
        wide = wide.replace(name, other)
    red, green = wide.find(b"rXYZ"), wide.find(b"gXYZ")
    wide[red : red + 4], wide[green : green + 4] = b"gXYZ", b"rXYZ"  # red and green change places
    for data in (saved(Image.new("RGB", (16, 16), RED), form, icc_profile=bytes(wide)) for form in ("JPEG", "PNG")):
        image = decoded(encode_image(data, PLAIN))
        assert is_close(pixel(image, 8, 8), (0, 255, 0), by=6)
        assert "icc_profile" not in image.info


@pytest.mark.parametrize(
    "profile", [b"not a profile", b"\0" * 16 + b"RGB " + b"\0" * 200, b"\0" * 16 + b"CMYK" + b"\0" * 200]
)
def test_broken_or_foreign_profile_is_ignored(profile: bytes) -> None:
    image = decoded(encode_image(saved(Image.new("RGB", (16, 16), RED), "PNG", icc_profile=profile), PLAIN))
    assert pixel(image, 8, 8) == RED


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_cut_off_file_is_refused(image_format: str, share: float) -> None:
    """C78."""
    noise = Image.frombytes("RGB", (80, 60), random.Random(2).randbytes(80 * 60 * 3))
    data = saved(noise, image_format)
    with pytest.raises(RequestError) as caught:
        encode_image(data[: int(len(data) * share)], PLAIN)
    assert caught.value.kind is ErrorKind.BAD_IMAGE
    assert caught.value.message


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "TIFF"]), st.integers(0, 2000), st.binary(max_size=12))
def test_damage_anywhere_raises_nothing_else(image_format: str, offset: int, junk: bytes) -> None:
    data = saved(photo(24, 16), image_format)
    offset %= len(data)
    tiny = ImagePolicy(max_decode_pixels=10_000)  # damage may hit the size in the header
    with contextlib.suppress(RequestError):
        encoded = encode_image(data[:offset] + junk + data[offset + len(junk) :], tiny)
        if encoded.converted:
            decoded(encoded)


def test_png_with_a_wrong_checksum_is_not_sent_as_it_is() -> None:
    data = bytearray(saved(photo(), "PNG"))
    data[-20] ^= 1
    with pytest.raises(RequestError):
        encode_image(bytes(data), PLAIN)


@pytest.mark.parametrize(("data", "reason"), [
    (b"", "is no picture"),
    (b"root:x:0:0:root\n", "is no picture"),
    (b"P1 # plain text in a name that ends in .jpg", "."),
    (b"  <!doctype html><p>Not found", "HTML"),
    (b"%PDF-1.7", "a PDF"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "PostScript"),
    (b"#define im_width 8\n#define im_height 1\nstatic char im_bits[] = {0x00};", "is no picture"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS"),
    (saved(Image.new("1", (8, 1)), "MSP"), "looks like MSP, a format that is not read here"),
    (png_header(20_000, 20_000) + png_chunk(b"IDAT", b"x") + png_chunk(b"IEND", b""), "20000x20000"),
])  # fmt: skip
def test_no_picture_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    """C77."""
    with pytest.raises(RequestError, match=reason) as caught:
        encode_image(data, PLAIN, "image /data/cat.jpg")
    assert caught.value.message.startswith("image /data/cat.jpg ")
    assert b"root" not in caught.value.message.encode()


def test_heic_without_its_extra_names_the_extra() -> None:
    if importlib.util.find_spec("pillow_heif"):
        pytest.skip("the extra is installed")
    with pytest.raises(RequestError, match=r"pip install beam_llm\[heic\]"):
        encode_image(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", PLAIN)


def test_first_frame_of_an_animation_is_sent() -> None:
    """C80."""
    frames = [Image.new("RGB", (12, 12), colour) for colour in (RED, (0, 255, 0), (0, 0, 255))]
    for image_format in ("GIF", "PNG", "WEBP"):
        data = saved(frames[0], image_format, save_all=True, append_images=frames[1:], duration=100)
        image = decoded(encode_image(data, replace(PLAIN, passthrough_formats=("JPEG", "PNG", "WEBP", "GIF"))))
        assert getattr(image, "n_frames", 1) == 1
        assert is_close(pixel(image, 6, 6), RED, by=6)


def test_mpo_is_sent_as_one_jpeg() -> None:
    data = saved(photo(), "MPO", save_all=True, append_images=[photo()])
    encoded = encode_image(data, PLAIN)
    assert (encoded.media_type, encoded.converted, decoded(encoded).format) == ("image/jpeg", True, "JPEG")


@pytest.mark.parametrize(("image_format", "options", "media_type"), [
    ("WEBP", {}, "image/jpeg"), ("WEBP", {"lossless": True}, "image/png"), ("AVIF", {}, "image/jpeg"),
    ("GIF", {}, "image/png"), ("BMP", {}, "image/png"), ("TIFF", {}, "image/png"), ("JPEG2000", {}, "image/png"),
])  # fmt: skip
def test_lossy_sources_become_jpeg_all_others_png(image_format: str, options: dict[str, bool], media_type: str) -> None:
    encoded = encode_image(saved(photo(), image_format, **options), PLAIN)
    assert (encoded.media_type, encoded.converted) == (media_type, True)
    assert is_close(pixel(decoded(encoded), 32, 1), RED)


def test_format_named_in_the_policy_passes_if_it_is_plain() -> None:
    policy = replace(PLAIN, passthrough_formats=("WEBP",))
    plain = saved(photo(), "WEBP")
    assert encode_image(plain, policy) == EncodedImage(plain, "image/webp", 64, 48, converted=False)
    for data in (saved(photo().convert("RGBA").resize((9, 9)), "WEBP", exif=exif(6)), saved(photo(), "JPEG")):
        assert encode_image(data, policy).converted
    with pytest.raises(RequestError):
        encode_image(plain[:-40], policy)


@pytest.mark.parametrize(("size", "limits", "wanted"), [
    ((4000, 3000), {}, (4000, 3000)),
    ((4000, 3000), {"max_side": 1000}, (1000, 750)),
    ((3000, 4000), {"max_side": 1000}, (750, 1000)),
    ((4000, 3000), {"max_pixels": 120_000}, (400, 300)),
    ((3000, 1), {"max_side": 100}, (100, 1)),
    ((100_000, 1), {"max_pixels": 1000}, (1000, 1)),
    ((1, 1), {"min_side": 28}, (28, 28)),
    ((26, 28), {"min_side": 28}, (28, 30)),
    ((3000, 10), {"min_side": 28}, (8400, 28)),
])  # fmt: skip
def test_target_size(size: tuple[int, int], limits: dict[str, int], wanted: tuple[int, int]) -> None:
    assert target_size(*size, ImagePolicy(**limits)) == wanted  # type: ignore[arg-type]


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 10**6), st.integers(1, 9000))
def test_target_size_never_exceeds_the_limits(width: int, height: int, max_pixels: int, max_side: int) -> None:
    size = target_size(width, height, ImagePolicy(max_pixels=max_pixels, max_side=max_side))
    assert size[0] * size[1] <= max_pixels
    assert 1 <= min(size) <= max(size) <= max_side


def test_least_side_beyond_another_limit_is_refused() -> None:
    """C81."""
    with pytest.raises(RequestError, match="min_side 28"):
        encode_image(saved(Image.new("RGB", (3000, 10)), "PNG"), ImagePolicy(min_side=28, max_side=3000))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "RGBA", "P"])
def test_large_picture_is_made_smaller(mode: str) -> None:
    source = photo(900, 600).convert(mode)
    image_format = "PNG" if mode in ("RGBA", "P") else "JPEG"
    encoded = encode_image(saved(source, image_format), ImagePolicy(max_side=100))
    assert decoded(encoded).size == (100, 66)
    assert pixel(decoded(encoded), 50, 5)[0] > (200 if mode != "L" else 60)


@pytest.mark.parametrize(
    ("policy_format", "media_type"), [("auto", "image/jpeg"), ("jpeg", "image/jpeg"), ("png", "image/png")]
)
def test_result_fits_into_max_bytes(policy_format: str, media_type: str) -> None:
    """C83."""
    noise = Image.frombytes("RGB", (300, 200), random.Random(3).randbytes(300 * 200 * 3))
    for data in (saved(noise, "PNG"), saved(noise, "JPEG", quality=95)):
        encoded = encode_image(data, ImagePolicy(max_bytes=8000, format=policy_format))
        assert len(encoded.data) <= 8000
        assert decoded(encoded).width > 30
        assert encoded.media_type == media_type


def test_max_bytes_too_small_for_any_picture_is_refused() -> None:
    with pytest.raises(RequestError, match="max_bytes"):
        encode_image(saved(photo(), "PNG"), ImagePolicy(max_bytes=100))


def test_format_in_the_policy_wins() -> None:
    assert encode_image(saved(photo(), "PNG"), replace(PLAIN, format="jpeg")).media_type == "image/jpeg"
    assert encode_image(saved(photo(), "JPEG"), replace(PLAIN, format="png")).media_type == "image/png"


def test_same_picture_gives_same_pixels_from_bytes_and_pil(tmp_path: Path) -> None:
    """C87."""
    path = tmp_path / "turned.webp"
    path.write_bytes(saved(photo().convert("RGBA"), "WEBP", lossless=True, exif=exif(6)))
    jpeg = tmp_path / "plain.jpg"
    jpeg.write_bytes(saved(photo(), "JPEG"))
    for file in (path, jpeg):
        with Image.open(file) as lazy:
            assert encode_image(lazy, PLAIN) == encode_image(file.read_bytes(), PLAIN)
    loaded = Image.open(BytesIO(saved(photo().convert("RGBA"), "PNG", exif=exif(6))))
    loaded.load()
    assert encode_image(loaded, PLAIN) == encode_image(saved(photo().convert("RGBA"), "PNG", exif=exif(6)), PLAIN)


def test_lazily_opened_picture_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "anim.gif"
    frames = [Image.new("RGB", (12, 12), colour) for colour in (RED, (0, 255, 0))]
    path.write_bytes(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    with Image.open(path) as lazy:
        assert is_close(pixel(decoded(encode_image(lazy, PLAIN)), 5, 5), RED)
        lazy.seek(1)
        assert is_close(pixel(decoded(encode_image(lazy, PLAIN)), 5, 5), (0, 255, 0))
        assert lazy.tell() == 1


def test_closed_and_empty_pil_images_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(saved(photo(), "PNG"))
    with Image.open(path) as closed:
        pass
    for source in (closed, Image.new("RGB", (0, 5))):
        with pytest.raises(RequestError):
            encode_image(source, PLAIN)


def test_threads_encode_side_by_side_and_leave_the_warning_filters_alone() -> None:
    broken_exif = saved(photo(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01")
    before = list(warnings.filters)
    threads = [threading.Thread(target=encode_image, args=(broken_exif, PLAIN)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before


def test_data_url_is_the_files_base64() -> None:
    encoded = encode_image(saved(photo(), "PNG"), PLAIN)
    assert str(data_url(encoded)) == "data:image/png;base64," + base64.b64encode(encoded.data).decode()


@pytest.mark.parametrize("wrong", [
    {"max_pixels": 0}, {"max_side": -1}, {"min_side": 0}, {"max_bytes": 0}, {"max_decode_pixels": 0},
    {"format": "webp"}, {"quality": 0}, {"quality": 101}, {"background": (0, 0)}, {"background": (0, 0, 256)},
    {"passthrough_formats": ("EPS",)}, {"download_timeout_s": 0}, {"max_download_bytes": 0},
    {"min_side": 100, "max_side": 50}, {"min_side": 100, "max_pixels": 5000},
])  # fmt: skip
def test_policy_names_the_setting_that_cannot_work(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"\b{next(iter(wrong))}\b"):
        ImagePolicy(**wrong)  # type: ignore[arg-type]


def test_policy_can_be_pickled() -> None:
    policy = ImagePolicy(max_side=5)
    assert pickle.loads(pickle.dumps(policy)) == policy  # noqa: S301
