"""ImagePolicy: what pictures may be read, and how they are sent."""

from __future__ import annotations

from dataclasses import dataclass

from beam_llm.errors import ConfigError
from beam_llm.field_types import check_field_types
from beam_llm.images.pixels import READABLE_FORMATS


@dataclass(frozen=True, slots=True)
class ImagePolicy:
    """What pictures may be read, and how they are sent.

    Args:
        max_pixels: Width times height of what is sent; larger pictures are made smaller. None: no limit.
        max_side: Longer side of what is sent, in pixels. None: no limit.
        min_side: Shorter side of what is sent, in pixels; smaller pictures are scaled up, and refused where that
            would break another limit. None: no limit.
        max_bytes: Bytes of the file that is sent, before base64 (which adds a third). What is larger becomes a
            JPEG of falling quality, then of falling size. None: no limit.
        format: `auto`, `jpeg` or `png`; `auto` keeps what is sent as it is and else follows the source.
        quality: JPEG quality, 1 to 100.
        background: Colour behind transparent pixels, (red, green, blue).
        passthrough_formats: Formats, by Pillow's names, that may be sent as they are.
        max_decode_pixels: Pictures with more are refused as bombs, before a pixel is decoded.
        fetch_images: Whether to download http(s) pictures here; else the model server is given the URL.
        root: Local folder or prefix (`gs://bucket/images/`). Only what lies in it is read, links resolved, and
            relative references start there. None: any file that the worker can read.
        allow_private_addresses: Whether downloads may go to private, loopback and link-local addresses.
        max_download_bytes: Most bytes read of one picture, from wherever it comes.
        download_timeout_s: Seconds for one try of a download.
        user_agent: Sent with downloads. None: `beam_llm/<version>`.
        cache_bytes: Of encoded pictures that each process keeps in case they recur, those used last; 0 keeps none.
    """

    max_pixels: int | None = None
    max_side: int | None = None
    min_side: int | None = None
    max_bytes: int | None = None
    format: str = "auto"
    quality: int = 90
    background: tuple[int, int, int] = (255, 255, 255)
    passthrough_formats: tuple[str, ...] = ("JPEG", "PNG")
    max_decode_pixels: int = 200_000_000
    fetch_images: bool = False
    root: str | None = None
    allow_private_addresses: bool = False
    max_download_bytes: int = 100 * 2**20
    download_timeout_s: float = 30.0
    user_agent: str | None = None
    cache_bytes: int = 32 * 2**20

    def __post_init__(self) -> None:
        check_field_types(self)
        limits = ("max_pixels", "max_side", "min_side", "max_bytes", "max_decode_pixels", "max_download_bytes")
        for name in limits:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"ImagePolicy.{name} must be >= 1 or None for no limit, got {value}")
        if self.cache_bytes < 0:
            raise ConfigError(f"ImagePolicy.cache_bytes must be >= 0 (0 keeps none), got {self.cache_bytes}")
        if self.format not in ("auto", "jpeg", "png"):
            raise ConfigError(f"ImagePolicy.format must be auto, jpeg or png, got {self.format!r}")
        if not 1 <= self.quality <= 100:
            raise ConfigError(f"ImagePolicy.quality must be 1 to 100, got {self.quality}")
        if len(self.background) != 3 or not all(0 <= value <= 255 for value in self.background):
            raise ConfigError(f"ImagePolicy.background must be three numbers 0 to 255, got {self.background}")
        if unknown := [name for name in self.passthrough_formats if name not in READABLE_FORMATS]:
            raise ConfigError(f"ImagePolicy.passthrough_formats must be of {READABLE_FORMATS}, got {unknown}")
        if not self.download_timeout_s > 0:
            raise ConfigError(f"ImagePolicy.download_timeout_s must be > 0, got {self.download_timeout_s}")
        side = self.min_side or 1
        if side > (self.max_side or side) or side * side > (self.max_pixels or side * side):
            raise ConfigError(f"ImagePolicy.min_side {side} cannot be met within max_side and max_pixels; lower it")
