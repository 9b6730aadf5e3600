"""What the command line alone cannot show: every input kind gives the same picture, and part of a file never passes."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from beam_llm.errors import RequestError
from beam_llm.images import EncodedImage, ImagePolicy, encode_image
from beam_llm.images.loading import load_image
from beam_llm.images.pixels import READABLE_FORMATS
from tests.pictures.reference import Pixels, decoded, rgb

pytestmark = pytest.mark.timeout(300)

PLAIN = ImagePolicy()
LARGEST = 200_000
"""Bytes; what is in the larger files takes long to decode and is in smaller ones too."""

WITH_AN_END = ("JPEG", "PNG", "GIF", "WEBP", "HEIF", "AVIF")
MORE_BEHIND_IT = ("*/sugarshack_bad_mpo_header.jpg", "*/tRNS_null_1x1.png")
"""Their end is followed by something that is not sent and may be cut off."""
ENDS_IN_A_NUMBER = "*_plain.p?m"
"""Text; the last number may lose digits and still be one."""


def small_files(files: dict[str, Path], step: int) -> Iterator[tuple[str, Path]]:
    return ((name, path) for name, path in list(files.items())[::step] if path.stat().st_size <= LARGEST)


def encoded(reference: Any) -> EncodedImage | None:
    """The picture of an image reference; None if it is refused."""
    try:
        source = load_image(reference, PLAIN)
        return None if isinstance(source, str) else encode_image(source, PLAIN)
    except RequestError:
        return None


@contextmanager
def opened(path: Path) -> Iterator[Image.Image | None]:
    """A PIL image of a file, not loaded; None if Pillow knows no such format."""
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(file)
        except Exception:  # whatever Pillow raises
            image = None
        yield image


def pixels_of(picture: EncodedImage) -> Pixels:
    return rgb(decoded(picture.data))


def saved_as_jpeg(picture: EncodedImage) -> Pixels:
    file = BytesIO()
    decoded(picture.data).save(file, "JPEG", quality=PLAIN.quality)
    return rgb(decoded(file.getvalue()))


def test_path_url_bytes_data_url_mapping_and_opened_image_give_the_same_file(files: dict[str, Path]) -> None:
    """A PIL image in a format that is not read here is taken nonetheless: its caller has chosen to open it."""
    faults = []
    for name, path in small_files(files, 2):
        data = path.read_bytes()
        wanted = encoded(data)
        kinds: dict[str, Any] = {
            "path": str(path),
            "URL": path.as_uri(),
            "data URL": f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}",
            "mapping of bytes": {"bytes": data, "path": None},
            "mapping of a path": {"bytes": None, "path": str(path)},
        }
        with opened(path) as image:
            if image is not None and image.format in READABLE_FORMATS:
                kinds["opened"] = image
            faults += [(name, kind) for kind, reference in kinds.items() if encoded(reference) != wanted]
    assert faults == []


def test_loaded_image_gives_the_same_pixels_but_for_another_round_of_jpeg(files: dict[str, Path]) -> None:
    """A loaded image has lost its file, so that a JPEG that was sent as it is must be made anew."""
    faults, same, anew = [], 0, 0
    for name, path in small_files(files, 2):
        if (wanted := encoded(path)) is None:
            continue
        with opened(path) as image:
            assert image is not None, name
            image.load()
            got = encoded(image)
        is_anew = wanted.media_type == "image/jpeg" and not wanted.converted
        ideal = saved_as_jpeg(wanted) if is_anew else pixels_of(wanted)
        if got is None or not np.array_equal(pixels_of(got), ideal):
            faults.append(name)
        same, anew = same + (not is_anew), anew + is_anew
    assert faults == []
    assert same > 300
    assert anew > 5


def test_file_that_was_cut_off_is_refused_or_has_lost_nothing_of_the_picture(files: dict[str, Path]) -> None:
    """Formats that mark their end are always refused; of others, padding, a preview or another page may be missing."""
    faults, refused = [], 0
    for name, path in small_files(files, 3):
        data = path.read_bytes()
        whole = encoded(data)
        if whole is None or fnmatch(name, ENDS_IN_A_NUMBER):
            continue
        with opened(path) as image:
            has_end = image is not None and image.format in WITH_AN_END
        may_pass = not has_end or any(fnmatch(name, pattern) for pattern in MORE_BEHIND_IT)
        for missing in {1, 2, 4, 12, 30, len(data) // 10, len(data) // 2}:
            part = encoded(data[:-missing]) if 0 < missing < len(data) else None
            if part is not None and not (may_pass and np.array_equal(pixels_of(part), pixels_of(whole))):
                faults.append((name, missing))
            refused += part is None
    assert faults == []
    assert refused > 1000


def test_bitmaps_look_as_the_author_of_their_collection_shows_them(files: dict[str, Path]) -> None:
    """The one reference here that Pillow had no hand in; 5 and 6 bits a channel leave room for rounding."""
    shown = {Path(name).stem.removesuffix("-e"): path for name, path in files.items() if "/bmp/html/" in name}
    faults, seen = [], 0
    for name, path in files.items():
        titles = [title for title in shown if Path(name).stem.startswith(title)]
        if "/bmp/g/" not in name or not titles or (picture := encoded(path)) is None:
            continue
        wanted = rgb(decoded(shown[max(titles, key=len)].read_bytes()))
        got = pixels_of(picture)
        if got.shape != wanted.shape or np.abs(got.astype(int) - wanted).max() > 1:
            faults.append(name)
        seen += 1
    assert faults == []
    assert seen > 15
