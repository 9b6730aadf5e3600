"""Every picture file that Pillow, pillow-heif and scikit-image ship: sent as it should be seen, or a row with a reason.

Not part of `make test`: `make test-pictures` runs it, and downloads 78 MB the first time.
"""

from __future__ import annotations

import base64
import os
import sys
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from beam_llm.images import ImagePolicy
from tests.commands import Finished, run, write_lines
from tests.endpoint import ScriptedEndpoint, answer
from tests.pictures.reference import Pixels, Reference, decoded, is_whole, kind_by_magic, reference_of, rgb

pytestmark = pytest.mark.timeout(400)

SOME_ROWS_FAILED = 3
MAX_SIDE, MAX_PIXELS, MAX_BYTES = 512, 200_000, 60_000
JPEG_SLACK = 0.5

REFUSED = {
    "is no picture": ("*.tga", "*.im", "*.imt", "*.pcd", "*.spider"),  # nothing in the file says what it is
    "a format that is not read here": (  # of other times and trades; some start programs or pass text for a picture
        "*.ara", "*.blp", "*.cur", "*.dcx", "*.fits", "*.fli", "*.ftc", "*.ftu", "*.gbr", "*.im1", "*.msp", "*.p7",
        "*.pxr", "*.ras", "*.xbm", "*.xpm", "*.eps",
    ),
    "is cut off": ("pillow_heif/heif_truncated/truncated.heic",),  # libheif fills up what is missing
    "a 4-bit RLE bitmap": ("pillow/bmp/?/pal4rle*.bmp",),  # Pillow 12 gives noise
}  # fmt: skip
"""What Pillow reads and we do not, by the reason that the row must give."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A picture as the server got it."""

    media_type: str
    data: bytes

    def pixels(self) -> Pixels:
        return rgb(decoded(self.data))


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the command over all files.

    Args:
        done: The ended command.
        sent: Each picture that the server got, by the name of its file; more than one if it was sent again.
    """

    done: Finished
    sent: dict[str, list[Sent]] = field(default_factory=lambda: defaultdict(list))

    @property
    def pictures(self) -> dict[str, Sent]:
        return {name: pictures[0] for name, pictures in sorted(self.sent.items())}

    @property
    def reasons(self) -> dict[str, str]:
        return {record["file"]: record["error"]["message"] for record in self.done.failed}


def run_over(files: dict[str, Path], folder: Path, *flags: str) -> Run:
    sent: dict[str, list[Sent]] = defaultdict(list)

    async def keep(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        picture, text = body["messages"][-1]["content"]
        head, _, payload = picture.pop("image_url")["url"].partition(";base64,")
        sent[text["text"]].append(Sent(head.removeprefix("data:"), base64.b64decode(payload, validate=True)))
        return answer()

    rows = write_lines(folder / "rows.jsonl", *({"file": name, "image": str(path)} for name, path in files.items()))
    with ScriptedEndpoint(keep) as endpoint:
        done = run(
            folder / "out",
            f"--input={rows}",
            "--input_format=rows",
            "--image_column=image",
            "--prompt={file}",
            f"--base_url={endpoint.base_url}",
            "--model=m",
            "--num_workers=2",
            *flags,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},  # so that its workers read HEIC too
            timeout_s=300,
            code=SOME_ROWS_FAILED,
        )
    return Run(done, sent)


@pytest.fixture(scope="module")
def plain(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_over(files, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def limited(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    limits = f"--image_max_side={MAX_SIDE}", f"--image_max_pixels={MAX_PIXELS}", f"--image_max_bytes={MAX_BYTES}"
    return run_over(files, tmp_path_factory.mktemp("limited"), *limits, "--image_format=jpeg")


@pytest.mark.parametrize("kind", ["plain", "limited"])
def test_every_file_is_one_record_and_at_most_one_request(
    kind: str, files: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    ran: Run = request.getfixturevalue(kind)
    completed = [record["file"] for record in ran.done.completed]
    assert sorted([*completed, *ran.reasons]) == sorted(files)
    assert Counter({name: len(pictures) for name, pictures in ran.sent.items()}) == Counter(completed)
    assert len(completed) > 850
    assert {record["error"]["kind"] for record in ran.done.failed} == {"bad_image"}
    unnamed = [reason for name, reason in ran.reasons.items() if not reason.startswith(f"image {files[name]} ")]
    assert unnamed == []


@pytest.mark.parametrize("kind", ["plain", "limited"])
def test_what_is_sent_is_a_whole_plain_picture(kind: str, request: pytest.FixtureRequest) -> None:
    ran: Run = request.getfixturevalue(kind)
    faults = {name: fault for name, sent in ran.pictures.items() if (fault := fault_of_file(sent))}
    assert faults == {}


def fault_of_file(sent: Sent) -> str | None:
    """Why a server might not read a picture, or read it another way; None if it must."""
    if kind_by_magic(sent.data) != sent.media_type:
        return f"{sent.media_type} is {kind_by_magic(sent.data)}"
    if not is_whole(sent.data):
        return "not whole"
    try:
        image = decoded(sent.data)
    except Exception as error:  # whatever it is, the picture is broken
        return repr(error)
    if image.mode not in ("RGB", "L") or "transparency" in image.info:
        return f"mode {image.mode}, {sorted(image.info)}"
    if (frames := getattr(image, "n_frames", 1)) != 1:
        return f"{frames} frames"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Exif that ends too early
        orientation = image.getexif().get(0x0112, 1)
    if orientation not in (0, 1):
        return f"orientation {orientation}"
    return None


def test_pixels_are_those_of_a_plain_reading_and_what_is_refused_cannot_be_read(
    files: dict[str, Path], plain: Run
) -> None:
    faults = {}
    for name, path in files.items():
        try:
            reference = reference_of(path)
        except Exception as error:
            if name in plain.sent:
                faults[name] = f"sent, though {error!r}"
            continue
        if name in plain.sent:
            if fault := fault_of_pixels(plain.pictures[name], reference, path.read_bytes()):
                faults[name] = fault
        elif not is_rightly_refused(name, plain.reasons[name]):
            faults[name] = plain.reasons[name]
    assert faults == {}


def is_rightly_refused(name: str, reason: str) -> bool:
    return any(text in reason and any(fnmatch(name, p) for p in patterns) for text, patterns in REFUSED.items())


def fault_of_pixels(sent: Sent, reference: Reference, original: bytes) -> str | None:
    """How a picture differs from its reference; None if it does not.

    A PNG and a file sent as it is must agree to the last bit, but for the reference's own rounding. A JPEG made anew
    may lose half a level more than a JPEG of the reference at the same quality does.
    """
    pixels = sent.pixels()
    if pixels.shape != reference.pixels.shape:
        return f"{pixels.shape} instead of {reference.pixels.shape}"
    if sent.media_type == "image/png" or original.startswith(sent.data):
        worst = max(int(difference.max()) for difference in differences(pixels, reference.pixels))
        return f"a value is off by {worst}" if worst > reference.slack else None
    if (found := mean_difference(pixels, reference.pixels)) <= JPEG_SLACK:
        return None
    file = BytesIO()
    Image.fromarray(reference.pixels).save(file, "JPEG", quality=ImagePolicy().quality)
    loss = mean_difference(rgb(decoded(file.getvalue())), reference.pixels)
    return f"mean difference {found:.2f} instead of {loss:.2f}" if found > loss + JPEG_SLACK else None


def differences(one: Pixels, other: Pixels) -> list[Pixels]:
    """Absolute differences, a strip of the picture at a time: the largest has 600 MB."""
    strips = (slice(top, top + 256) for top in range(0, len(one), 256))
    return [np.maximum(one[strip], other[strip]) - np.minimum(one[strip], other[strip]) for strip in strips]


def mean_difference(one: Pixels, other: Pixels) -> float:
    return sum(float(difference.sum(dtype=np.float64)) for difference in differences(one, other)) / one.size


def test_limits_hold_and_the_picture_stays_the_same(plain: Run, limited: Run) -> None:
    assert limited.sent.keys() == plain.sent.keys()
    faults = {}
    for name, sent in limited.pictures.items():
        image, whole = decoded(sent.data), decoded(plain.pictures[name].data)
        scale = max(image.width / whole.width, image.height / whole.height)
        ideal = whole.width * scale, whole.height * scale
        if sent.media_type != "image/jpeg" or len(sent.data) > MAX_BYTES:
            faults[name] = f"{sent.media_type} of {len(sent.data)} bytes"
        elif max(image.size) > MAX_SIDE or image.width * image.height > MAX_PIXELS or scale > 1:
            faults[name] = f"{image.size} of {whole.size}"
        elif abs(image.width - ideal[0]) > 1.5 or abs(image.height - ideal[1]) > 1.5:  # whole pixels, rounded twice
            faults[name] = f"out of shape: {image.size} of {whole.size}"
        elif sent.data != plain.pictures[name].data and (shift := mean_difference(*thumbnails(image, whole))) > 5:
            faults[name] = f"another picture: off by {shift:.1f}"
    assert faults == {}


def thumbnails(image: Image.Image, whole: Image.Image) -> tuple[Pixels, Pixels]:
    """8 x 8 means of a picture and of what plain Pillow makes of the whole one at its size, which are much the same.

    They are not if it was turned or coloured anew. Both are JPEG, as tiny pictures lose most of their colour in it.
    """
    file = BytesIO()
    whole.resize(image.size, Image.Resampling.LANCZOS).save(file, "JPEG", quality=ImagePolicy().quality)
    pair = (rgb(each.convert("RGB").resize((8, 8), Image.Resampling.BOX)) for each in (image, decoded(file.getvalue())))
    return next(pair), next(pair)
