"""From any picture that Pillow reads to upright, opaque, 8-bit sRGB pixels of the wanted size."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO

import PIL
from PIL import Image, ImageCms, ImageFile

from beam_llm.errors import ErrorKind, RequestError
from beam_llm.images.checks import is_srgb_profile
from beam_llm.images.wholeness import is_cut_off

# Left out on purpose: EPS and WMF start other programs, XBM, XPM, IM and the like take plain text for a picture,
# TGA, SPIDER and PCD have no signature and take anything, BUFR, GRIB and HDF5 are stubs that read nothing.
READABLE_FORMATS = (
    "JPEG", "PNG", "WEBP", "GIF", "HEIF", "AVIF", "TIFF", "BMP", "JPEG2000", "PPM", "ICO", "MPO", "DIB", "PSD",
    "QOI", "ICNS", "DDS", "SGI", "PCX",
)  # fmt: skip

_OTHER_KINDS = (
    (b"%PDF", "a PDF"),
    (b"%!PS", "PostScript"),
    (b"<", "HTML, XML or SVG text"),
    (b"version https://git-lfs", "a Git LFS pointer; fetch the file itself"),
    (b"\x1f\x8b", "gzip data"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM film"),
)

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Exif orientation -> what makes the picture upright."""

_LOOKALIKES = {"CUR": "CUR or TGA"}
_RLE4 = 2
_READS_RLE4 = int(PIL.__version__.partition(".")[0]) >= 13
"""Before, Pillow lost its place in the data of 4-bit BMP files and gave noise."""

_PROFILE_SPACES = {"RGB": b"RGB ", "L": b"GRAY", "CMYK": b"CMYK"}


class _QuietPillow:
    """Keeps Pillow's warnings (corrupt Exif, odd APNG, …) in; they are about one row and nobody's log.

    `warnings.catch_warnings` swaps a global list and must be nested, which threads do not. So the first thread in
    enters it and the last one out leaves it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._caught = warnings.catch_warnings()
                self._caught.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._caught.__exit__(None, None, None)


quiet_pillow = _QuietPillow().__call__


def open_picture(data: bytes) -> ImageFile.ImageFile:
    """Read the header of a picture by its bytes, never its name; pixels come later.

    Pillow's `Image.open` is not used because its limit for bombs is one number for the whole process.

    Raises:
        RequestError: No picture, one that was cut off, or one in a format that needs an extra or is not read.
    """
    prefix = data[:16]
    is_heif = prefix[4:8] == b"ftyp" and any(brand in data[8:40] for brand in (b"heic", b"heix", b"mif1", b"msf1"))
    formats = _installed_formats()
    for name in formats:
        factory, accept = Image.OPEN[name]
        try:
            if accept is None or accept(prefix) is True:
                return _sound(factory(BytesIO(data), ""), data)
        except (SyntaxError, IndexError, TypeError, struct.error):
            continue
    if is_heif and "HEIF" not in formats:
        raise RequestError("is HEIC, which needs `pip install beam_llm[heic]`", ErrorKind.BAD_IMAGE)
    raise RequestError(f"is no picture, or too broken to tell its format{_looks_like(data)}", ErrorKind.BAD_IMAGE)


def _sound(image: ImageFile.ImageFile, data: bytes) -> ImageFile.ImageFile:
    """The picture, unless Pillow would read it without an error and yet not as it was meant."""
    if is_cut_off(data, image.format or ""):
        reason = f"is cut off: {len(data)} bytes, and the end of the {image.format} file is not among them"
        raise RequestError(reason, ErrorKind.BAD_IMAGE)
    if image.format in ("BMP", "DIB") and image.info.get("compression") == _RLE4 and not _READS_RLE4:
        raise RequestError("is a 4-bit RLE bitmap, which needs `pip install 'Pillow>=13'`", ErrorKind.BAD_IMAGE)
    return image


def _looks_like(data: bytes) -> str:
    """What to add to the news that bytes are no picture; empty if nothing is known about them."""
    start = data[:64].lstrip()
    if name := next((name for sign, name in _OTHER_KINDS if start.startswith(sign)), None):
        return f"; it looks like {name}"
    for name, (_, accept) in Image.OPEN.items():
        with suppress(IndexError, struct.error):  # of too few bytes
            if name not in READABLE_FORMATS and accept is not None and accept(data[:16]) is True:
                return f"; it looks like {_LOOKALIKES.get(name, name)}, a format that is not read here"
    return ""


@functools.lru_cache(maxsize=1)
def _installed_formats() -> tuple[str, ...]:
    Image.init()
    if importlib.util.find_spec("pillow_heif"):
        importlib.import_module("pillow_heif").register_heif_opener()
    return tuple(name for name in READABLE_FORMATS if name in Image.OPEN)


def media_type(image_format: str) -> str:
    """The media type of a format, such as `image/jpeg`; Pillow's own table, which is empty until its plugins are in."""
    _installed_formats()
    return Image.MIME[image_format]


def turn_to_upright(image: Image.Image) -> Image.Transpose | None:
    """The turn that its Exif or XMP orientation asks for; None if there is none, or the Exif block is broken.

    Load the pixels first: Pillow turns TIFF files itself when it loads them, and drops the tag.
    """
    try:
        orientation = image.getexif().get(0x0112)
    except Exception:  # struct.error, SyntaxError, ValueError, … depending on where the block is broken
        return None
    return _TURNS.get(orientation) if isinstance(orientation, int) else None


def flat_srgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """The picture as opaque sRGB, mode `RGB`, or `L` where it is grey and opaque.

    | mode | becomes |
    | --- | --- |
    | RGB, L | itself, through its ICC profile if that is not sRGB |
    | 1, I, I;16*, F | L; 16 bits and more are scaled to 8 (see `_grey_8_bit`) |
    | P, RGBX, YCbCr, LAB, HSV | RGB |
    | CMYK | RGB through its profile, else by the plain formula (Adobe's inverted files are set right by Pillow) |
    | RGBA, RGBa, LA, La, PA and any mode with a transparent colour | blended with the background |
    """
    profile = image.info.get("icc_profile")
    opaque, alpha = _split_alpha(image)
    if isinstance(profile, bytes) and profile:
        opaque = _to_srgb(opaque, profile)
    if opaque.mode not in ("RGB", "L"):
        opaque = opaque.convert("RGB")
    if alpha is None:
        return opaque
    flat = Image.new("RGB", image.size, background)
    flat.paste(opaque if opaque.mode == "RGB" else opaque.convert("RGB"), mask=alpha)
    return flat


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Colours alone, with 8 bits a channel, and the alpha channel; None if the picture is opaque."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _grey_8_bit(image)
    if image.mode == "1" and "transparency" not in image.info:
        return image.convert("L"), None
    if image.mode in ("La", "RGBa"):
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
    if image.mode == "LA":
        return image.getchannel("L"), image.getchannel("A")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return image.convert("RGB"), image.getchannel("A")
    if image.mode in _PROFILE_SPACES:
        return image, None
    return image.convert("RGB"), None


def _grey_8_bit(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Grey of 16 or more bits as L, and its alpha.

    16-bit files run from 0 to 65535. I and F say nothing about their range, so it is the smallest usual one that
    holds every value (0-1 for F, 0-255, 0-65535), and the darkest and lightest value themselves if none does.
    """
    if image.mode.startswith("I;16"):
        low, high = 0.0, 65535.0
        bits = getattr(image, "tag_v2", {}).get(258)  # TIFF BitsPerSample: 12 in a 16-bit mode
        if isinstance(bits, tuple) and bits and 8 < bits[0] < 16:
            high = 2.0 ** bits[0] - 1
        transparent = image.info.get("transparency")
        image = image.convert("I")
        if isinstance(transparent, int):
            mask = image.point([0 if value == transparent else 255 for value in range(65536)], "L")
            return _scaled(image, low, high), mask
        return _scaled(image, low, high), None
    darkest, lightest = (float(value) for value in image.getextrema())  # type: ignore[arg-type]
    usual = (255.0, 65535.0) if image.mode == "I" else (1.0, 255.0, 65535.0)
    low, high = next(((0.0, top) for top in usual if darkest >= 0 and lightest <= top), (darkest, lightest))
    if not high - low < float("inf"):
        raise RequestError("has grey values that are no finite numbers", ErrorKind.BAD_IMAGE)
    return _scaled(image, low, high), None


def _scaled(image: Image.Image, low: float, high: float) -> Image.Image:
    scale = 255.0 / (high - low) if high > low else 0.0
    # Pillow evaluates the function once, on a symbol; 0.5 because the conversion to L cuts the fraction off.
    return image.point(lambda value: value * scale + (0.5 - low * scale)).convert("L")


def _to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """The picture through its profile; unchanged if that is sRGB, for another kind of picture, or broken."""
    if profile[16:20] != _PROFILE_SPACES.get(image.mode) or is_srgb_profile(profile):
        return image
    transform = _srgb_transform(profile, image.mode)
    return image if transform is None else transform.apply(image)


@functools.lru_cache(maxsize=16)
def _srgb_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The way from a profile to sRGB; None if the profile is broken. Cached: 5 ms each, and cameras share a few."""
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError):  # browsers show such files as sRGB too
        return None
