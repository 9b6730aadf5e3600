"""What a picture should look like once sent, worked out with Pillow and numpy, sharing no code with `beam_llm`."""

from __future__ import annotations

import struct
import warnings
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms, ImageOps

Pixels = npt.NDArray[np.uint8]

Image.init()  # else the order in which formats are tried depends on the files read before, and TGA takes some ICO files
Image.MAX_IMAGE_PIXELS = 100_000_000  # Pillow refuses what has twice as many, as beam_llm does by default


@dataclass(frozen=True, slots=True)
class Reference:
    """A picture as it should be seen.

    Args:
        pixels: Height, width, and red, green and blue.
        slack: What rounding may add to or take from a value: 1 where alpha was mixed or a profile applied, else 0.
    """

    pixels: Pixels
    slack: int


def reference_of(path: Path) -> Reference:
    """The first frame, upright, in sRGB, on white.

    Raises:
        Exception: Whatever Pillow raises for a file that it cannot read to its end.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(path) as image:
            image.load()
            profile = image.info.get("icc_profile")
            bits = (getattr(image, "tag_v2", None) or {}).get(258, (16,))[0]
            return _seen(ImageOps.exif_transpose(image), profile, bits)


def decoded(data: bytes) -> Image.Image:
    """A picture, read to its end by a Pillow that takes nothing but whole files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image = Image.open(BytesIO(data))
    image.load()
    return image


def rgb(image: Image.Image) -> Pixels:
    """The pixels of a picture that is sent."""
    return np.asarray(image.convert("RGB"))


def kind_by_magic(data: bytes) -> str:
    """The media type that the bytes themselves show."""
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    return f"neither JPEG nor PNG: {data[:12]!r}"


def is_whole(data: bytes) -> bool:
    """Whether a JPEG or PNG file ends where its format says, each chunk of a PNG with the right checksum."""
    if data.startswith(b"\xff\xd8"):
        return data.endswith(b"\xff\xd9")
    position, kind = 8, b""
    while position + 12 <= len(data) and kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, position)
        body = data[position + 4 : position + 8 + length]
        if zlib.crc32(body) != int.from_bytes(data[position + 8 + length : position + 12 + length], "big"):
            return False
        position += 12 + length
    return kind == b"IEND" and position == len(data)


def _seen(image: Image.Image, profile: bytes | None, bits: int) -> Reference:
    if image.mode == "F" or image.mode.startswith("I"):
        return Reference(_deep_grey(image, bits), 1)
    alpha: npt.NDArray[np.uint8] | None = None
    if image.mode in ("LA", "PA", "RGBA", "RGBa", "La") or "transparency" in image.info:
        if image.mode in ("La", "RGBa"):
            image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
        alpha = np.asarray(image.convert("RGBA").getchannel("A"))
        image = image.convert("L") if image.mode in ("LA", "L") else image.convert("RGBA").convert("RGB")
    elif image.mode == "1":
        image = image.convert("L")
    elif image.mode not in ("L", "RGB", "CMYK"):
        image = image.convert("RGB")
    slack = 0
    if profile:
        converted = _to_srgb(image, profile)
        slack, image = (0, image) if converted is None else (1, converted)
    colours = np.asarray(image.convert("RGB"))
    if alpha is None:
        return Reference(colours, slack)
    share = alpha[:, :, None] / 255.0
    mixed = np.rint(colours * share + 255.0 * (1 - share)).astype(np.uint8)
    return Reference(mixed, 1)


def _to_srgb(image: Image.Image, profile: bytes) -> Image.Image | None:
    """The picture through its profile; None if the profile is broken or made for another kind of picture."""
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        space = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}.get(source.profile.xcolor_space.strip())
        if space != image.mode:
            return None
        return ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError):
        return None


def _deep_grey(image: Image.Image, bits: int) -> Pixels:
    """Grey of more than 8 bits: the file's own depth if it says so, else the smallest usual range that holds it."""
    values = np.asarray(image if image.mode == "F" else image.convert("I"), np.float64)
    low, high = float(values.min()), float(values.max())
    if image.mode.startswith("I;16"):
        bottom, top = 0.0, 2.0 ** (bits if 8 < bits < 16 else 16) - 1
    else:
        tops = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
        bottom, top = next(((0.0, top) for top in tops if low >= 0 and high <= top), (low, high))
    grey = np.rint((values - bottom) * (255.0 / ((top - bottom) or 1.0)))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2)
