"""Pictures for a request: what is sent as it is and what is made anew under an `ImagePolicy`, and the data URL.

What a reference leads to (`images.loading` reads it):

| reference | gives |
| --- | --- |
| path, `file:` URL, `gs://` and other URLs of Beam's file systems, data URL | the file's bytes |
| http(s) URL | itself, for the server to fetch; with `ImagePolicy.fetch_images` the file's bytes |
| bytes; `{bytes, path}`, as in Hugging Face data sets; a Parquet cell | the bytes, else what the path leads to |
| PIL image, opened from a file and not loaded yet | the file's bytes |
| PIL image in memory | its pixels and `info` (Exif, profile); its `format` chooses JPEG or PNG |

What becomes of it:

| picture | becomes |
| --- | --- |
| JPEG, PNG: whole, upright, opaque, still, 8-bit RGB or grey, sRGB, within the limits | sent as it is |
| another format named in `passthrough_formats`, the same conditions | sent as it is, after one decode to be sure |
| any other JPEG, MPO, lossy WebP, HEIC, AVIF | as JPEG: |
| all else that Pillow reads | as PNG: |
| – Exif orientation 2 to 8 | upright |
| – RGBA, palette, transparent colour | flat on the background |
| – 16-bit, floating point, 1-bit | scaled to 8-bit |
| – CMYK, ICC profiles | sRGB, by the profile |
| – several frames or pages | the first one |
| – beyond the limits | smaller, or larger for `min_side` |
| broken, cut off, no picture, a bomb | refused |
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from io import BytesIO

import pybase64
from PIL import Image

from beam_llm.errors import ErrorKind, RequestError
from beam_llm.images.checks import PlainFile, inspect_file, is_lossless_webp, is_srgb_profile
from beam_llm.images.pixels import READABLE_FORMATS, flat_srgb, media_type, open_picture, quiet_pillow, turn_to_upright
from beam_llm.images.policy import ImagePolicy

__all__ = ["DataURL", "EncodedImage", "ImagePolicy", "data_url", "encode_image", "file_bytes", "target_size"]

_LOSSY_FORMATS = ("JPEG", "MPO", "WEBP", "HEIF", "AVIF")
_FALLING_QUALITY = (80, 65, 50)
_SMALLEST_SIDE = 16
_LONGEST_SIDE = 65_500
"""What a JPEG can have."""

_PNG_COMPRESSION = 1
"""Of a 640x480 photo: level 1 takes 19 ms and 437 kB, Pillow's default 88 ms and 399 kB."""

_DECODERS = threading.BoundedSemaphore(os.cpu_count() or 1)
"""Decoding takes a core and, of a large picture, a hundred megabytes: however many pictures are being loaded, no more
are decoded at once than there are cores."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A picture as it is sent.

    Args:
        data: The file's bytes.
        media_type: `image/jpeg`, … as the bytes are, whatever the file was called.
        width, height: In pixels.
        converted: False if these are the original's bytes.
    """

    data: bytes
    media_type: str
    width: int
    height: int
    converted: bool


def encode_image(source: bytes | Image.Image, policy: ImagePolicy, name: str = "image") -> EncodedImage:
    """Make a picture fit to be sent; see the table at the top of this file.

    Args:
        source: A file's bytes, or a PIL image, which is left as it is. Its file, if it still has one open, stays
            open until the caller lets go of it.
        policy: The limits and the form.
        name: What to call it in an error message.

    Raises:
        RequestError: It is no picture, it is broken, or it cannot be brought within the limits.
    """
    try:
        data = file_bytes(source) if isinstance(source, Image.Image) else source
        plain = inspect_file(data) if data is not None else None
        if data is not None and plain is not None and _may_pass(plain, policy):
            whole = data if plain.size == len(data) else data[: plain.size]
            return EncodedImage(whole, media_type(plain.image_format), plain.width, plain.height, converted=False)
        with _DECODERS, quiet_pillow():
            image = source if isinstance(source, Image.Image) and data is None else open_picture(data or b"")
            return _decode_and_encode(image, data, policy)
    except RequestError as error:
        raise RequestError(f"{name} {error.message}", ErrorKind.BAD_IMAGE) from error
    except Exception as error:  # OSError, SyntaxError, struct.error, zlib.error, MemoryError, …: Pillow raises them all
        reason = f"{type(error).__name__}: {error}"[:200]
        raise RequestError(f"{name} cannot be decoded ({reason})", ErrorKind.BAD_IMAGE) from error


@dataclass(frozen=True, slots=True)
class DataURL:
    """A picture as a `data:` URL, for the `image_url` part of a message; in two pieces, as one would be a copy.

    Args:
        head: `data:image/jpeg;base64,`
        payload: The base64 text.
    """

    head: bytes
    payload: bytes

    def __len__(self) -> int:
        return len(self.head) + len(self.payload)

    def __str__(self) -> str:
        return (self.head + self.payload).decode("ascii")


def data_url(encoded: EncodedImage) -> DataURL:
    """The picture as a `data:` URL."""
    return DataURL(f"data:{encoded.media_type};base64,".encode(), pybase64.b64encode(encoded.data))


def target_size(width: int, height: int, policy: ImagePolicy) -> tuple[int, int]:
    """Width and height to send, the picture's own where it is within the limits.

    Raises:
        RequestError: The picture is empty or a bomb, or `min_side` would break another limit.
    """
    if width < 1 or height < 1:
        raise RequestError(f"is {width}x{height}: it has no pixels", ErrorKind.BAD_IMAGE)
    if width * height > policy.max_decode_pixels:
        reason = f"is {width}x{height}, more than max_decode_pixels ({policy.max_decode_pixels})"
        raise RequestError(reason, ErrorKind.BAD_IMAGE)
    max_pixels = policy.max_pixels or width * height
    max_side = policy.max_side or max(width, height)
    scale = min(1.0, math.sqrt(max_pixels / (width * height)), max_side / max(width, height))
    size = _scaled_size(width, height, scale)
    size = (min(size[0], max(1, max_pixels // size[1])), min(size[1], max(1, max_pixels // size[0])))
    if policy.min_side is None or min(size) >= policy.min_side:
        return size
    grown = policy.min_side / min(size)
    size = (max(policy.min_side, round(size[0] * grown)), max(policy.min_side, round(size[1] * grown)))
    if size[0] * size[1] > (policy.max_pixels or policy.max_decode_pixels) or max(size) > (
        policy.max_side or _LONGEST_SIDE
    ):
        reason = f"is {width}x{height}: min_side {policy.min_side} would make it {size[0]}x{size[1]}, beyond the limits"
        raise RequestError(reason, ErrorKind.BAD_IMAGE)
    return size


def _scaled_size(width: int, height: int, scale: float) -> tuple[int, int]:
    # 1e-6: a side that is whole but for the float's last digit must not lose a pixel.
    return max(1, int(width * scale + 1e-6)), max(1, int(height * scale + 1e-6))


def _may_pass(plain: PlainFile, policy: ImagePolicy) -> bool:
    wanted = policy.format in ("auto", plain.image_format.lower())
    size = plain.width, plain.height
    fits = target_size(*size, policy) == size and plain.size <= (policy.max_bytes or plain.size)
    return fits and wanted and plain.image_format in policy.passthrough_formats


def file_bytes(image: Image.Image) -> bytes | None:
    """The file behind a PIL image that has not been loaded; None once its pixels may have been changed."""
    file = getattr(image, "fp", None)
    is_lazy = bool(getattr(image, "tile", None)) or getattr(image, "_im", image) is None
    if file is None or not is_lazy or image.format not in READABLE_FORMATS or image.tell() != 0:
        return None
    try:
        position = file.tell()
        file.seek(0)
        data = file.read()
        file.seek(position)
    except (OSError, ValueError, AttributeError):
        return None
    return data if isinstance(data, bytes) else None


def _decode_and_encode(image: Image.Image, data: bytes | None, policy: ImagePolicy) -> EncodedImage:
    target = target_size(*image.size, policy)
    image_format = image.format or ""
    if data is not None and image_format == "JPEG":
        image.draft(None, target)  # decodes at 1/2, 1/4 or 1/8, never below the target
    image.load()
    turn = turn_to_upright(image)
    if data is not None and turn is None and _may_pass_decoded(image, data, target, policy):
        return EncodedImage(data, media_type(image_format), *target, converted=False)
    pixels = image
    if image.mode in ("RGB", "L", "CMYK") and "transparency" not in image.info and target[0] < image.width:
        pixels = _resized(image, target)  # first, as what follows costs by the pixel
    pixels = flat_srgb(pixels, policy.background)
    if pixels.size != target:
        pixels = _resized(pixels, target)
    pixels = pixels.copy() if pixels is image else pixels
    pixels.info = {}  # Pillow would write the profile, comment and transparent colour that stand in it
    is_lossy = image_format in _LOSSY_FORMATS and not (data is not None and is_lossless_webp(data))
    return _encode_pixels(pixels if turn is None else pixels.transpose(turn), is_lossy, policy)


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Hamming's filter where a picture gets smaller: of 1.9 to 1 megapixel it takes 15 ms, Lanczos 32, bicubic 24, and
    for shrinking it is about as sharp as bicubic. Lanczos where it gets larger."""
    shrinks = size[0] <= image.width and size[1] <= image.height
    return image.resize(size, Image.Resampling.HAMMING if shrinks else Image.Resampling.LANCZOS)


def _may_pass_decoded(image: Image.Image, data: bytes, target: tuple[int, int], policy: ImagePolicy) -> bool:
    """Whether an upright, still picture other than JPEG and PNG, which decoded well, may be sent as it is."""
    profile = image.info.get("icc_profile")
    return (
        image.format not in ("JPEG", "PNG")
        and image.format in policy.passthrough_formats
        and policy.format == "auto"
        and image.mode in ("RGB", "L")
        and not image.has_transparency_data
        and (not profile or is_srgb_profile(profile))
        and image.size == target
        and len(data) <= (policy.max_bytes or len(data))
        and getattr(image, "n_frames", 1) == 1  # last: it may read through the whole file
    )


def _encode_pixels(pixels: Image.Image, is_lossy: bool, policy: ImagePolicy) -> EncodedImage:
    """Save; while that is more than `max_bytes`, as JPEG of falling quality, then of falling size.

    A `format` of `png` stays PNG and only gets smaller.
    """
    image_format = {"jpeg": "JPEG", "png": "PNG"}.get(policy.format, "JPEG" if is_lossy else "PNG")
    quality = policy.quality
    data = _saved(pixels, image_format, quality)
    limit = len(data) if policy.max_bytes is None else policy.max_bytes
    if len(data) > limit and policy.format != "png":
        image_format = "JPEG"
        for quality in (policy.quality, *(step for step in _FALLING_QUALITY if step < policy.quality)):
            data = _saved(pixels, image_format, quality)
            if len(data) <= limit:
                break
    smaller, scale = pixels, 1.0
    while len(data) > limit:
        scale *= min(0.9, 0.95 * math.sqrt(limit / len(data)))
        size = _scaled_size(*pixels.size, scale)
        if max(size) < _SMALLEST_SIDE or min(size) < (policy.min_side or 1):
            reason = f"is {pixels.width}x{pixels.height} and does not fit into max_bytes ({limit}) at a useful size"
            raise RequestError(reason, ErrorKind.BAD_IMAGE)
        smaller = _resized(pixels, size)
        data = _saved(smaller, image_format, quality)
    return EncodedImage(data, media_type(image_format), smaller.width, smaller.height, converted=True)


def _saved(pixels: Image.Image, image_format: str, quality: int) -> bytes:
    file = BytesIO()
    if image_format == "JPEG":
        pixels.save(file, "JPEG", quality=quality)
    else:
        pixels.save(file, "PNG", compress_level=_PNG_COMPRESSION)
    return file.getvalue()
