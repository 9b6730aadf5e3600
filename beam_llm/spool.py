"""Prompts and answers of one job in a folder: lines for ReadRequests, and beside them the pictures.

What is in memory, PIL objects above all, is written once and read by the one worker that sends it. Only file ranges
cross the shuffle, and a request in flight holds a `SpooledPicture`, not pixels.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from PIL import Image

from beam_llm.errors import ErrorKind, RequestError
from beam_llm.images import file_bytes
from beam_llm.jsontext import dumps, loads
from beam_llm.messages import image_references, replace_images, to_messages
from beam_llm.records import ChatRequest, Completion, FailedRequest, Outcome
from beam_llm.spill import Deferred

PROMPT_PATTERN = "prompts-*.jsonl"
"""The input of the job, in its folder."""

_PROMPT_FILES = 64
"""Prompts are dealt out to so many files, so that a few hundred, too, are shared evenly among the workers."""

_PICTURES = "pictures"
_RESULTS = "results"
_MARK = "spooled"
_LONGEST_INLINE = 4096
"""Characters of a reference that stays in its line; longer ones are data URLs."""


@dataclass(frozen=True, eq=False)
class SpooledPicture(Deferred):
    """An image reference that weighs nothing: the picture is read from the spool each time it is asked for.

    Args:
        file: Where the pictures are.
        offset: Where this one begins.
    """

    file: str
    offset: int

    def load(self) -> bytes | str | Image.Image:
        """A file's bytes, a data URL, or a PIL image, as it was given.

        Raises:
            RequestError: It cannot be read back.
        """
        try:
            with open(self.file, "rb") as file:
                file.seek(self.offset)
                image_format, picture = pickle.load(file)  # noqa: S301 - written by this job, in a folder of our own
        except Exception as error:  # unpickling may raise anything
            raise RequestError(
                f"image in the spool cannot be read back ({type(error).__name__}: {error})", ErrorKind.BAD_IMAGE
            ) from error
        if isinstance(picture, Image.Image):
            picture.format = image_format
        kept: bytes | str | Image.Image = picture
        return kept


class _PictureWriter:
    """Writes pictures one behind the other.

    Args:
        path: The file.
        shared: Whether a PIL image that several prompts share is written once. Wrong for prompts that are made one by
            one, perhaps from one image drawn over again and again.
    """

    def __init__(self, path: Path, shared: bool) -> None:
        self._path = path
        self._shared = shared
        self._places: dict[int, tuple[weakref.ref[Image.Image], int]] = {}

    def __enter__(self) -> _PictureWriter:
        self._file: IO[bytes] = self._path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def reference(self, reference: Any) -> Any:
        """What stands in the line for an image reference: short ones themselves, the mark of a place for others.

        Raises:
            RequestError: A PIL image whose pixels cannot be had.
        """
        if isinstance(reference, Mapping):
            reference = reference.get("bytes") or reference.get("path")
            if isinstance(reference, Mapping):
                raise RequestError("an image's bytes are an object", ErrorKind.BAD_IMAGE)
        if isinstance(reference, os.PathLike):
            return os.fsdecode(reference)
        if isinstance(reference, Image.Image):
            return {_MARK: self._place_of(reference)}
        if isinstance(reference, (bytes, bytearray, memoryview)):
            return {_MARK: self._write(bytes(reference))}
        if isinstance(reference, str) and len(reference) > _LONGEST_INLINE:
            return {_MARK: self._write(reference)}
        return reference

    def _place_of(self, image: Image.Image) -> int:
        known = self._places.get(id(image)) if self._shared else None
        if known is not None and known[0]() is image:  # else another one had that address before
            return known[1]
        place = self._write(image)
        self._places[id(image)] = weakref.ref(image), place
        return place

    def _write(self, picture: bytes | str | Image.Image) -> int:
        place = self._file.tell()
        try:
            pickle.dump(_storable(picture), self._file, protocol=5)
        except Exception as error:  # Pillow and pickle raise them all
            raise RequestError(
                f"an image cannot be read ({type(error).__name__}: {error})"[:500], ErrorKind.BAD_IMAGE
            ) from error
        return place


def _storable(picture: bytes | str | Image.Image) -> tuple[str | None, bytes | str | Image.Image]:
    """(PIL's format, what can be pickled without loss) of a picture in memory."""
    if not isinstance(picture, Image.Image):
        return None, picture
    if (data := file_bytes(picture)) is not None:
        return None, data
    image_format = picture.format
    if picture.palette is not None and picture.palette.mode != "RGB":
        picture = picture.convert("RGBA")  # Pillow 12 pickles palettes without their alpha
    if type(picture) is not Image.Image:
        picture = picture.copy()  # a plain image: the classes of formats do not survive pickling whole
    return image_format, picture


@dataclass(frozen=True, slots=True)
class Spool:
    """What `spool_prompts` has written.

    Args:
        folder: Where.
        prompts: Number of prompts given.
        refused: Those that no line was written for, by index.
    """

    folder: Path
    prompts: int
    refused: Mapping[int, RequestError] = field(default_factory=dict)

    @property
    def written(self) -> int:
        """Prompts to be sent."""
        return self.prompts - len(self.refused)

    @property
    def pattern(self) -> str:
        """The input of the job, for ReadRequests."""
        return str(self.folder / PROMPT_PATTERN)

    @property
    def results(self) -> str:
        """The output folder of the job, for WriteResults."""
        return str(self.folder / _RESULTS)

    def outcomes(self) -> Iterator[tuple[int, Outcome]]:
        """(index of the prompt, outcome) of every record in the output folder, in no order."""
        for path in sorted(Path(self.results).glob("*.jsonl")):
            with path.open("rb") as lines:
                yield from ((int(row["custom_id"]), _outcome(row)) for row in map(loads, lines))


def spool_prompts(prompts: Iterable[Any], folder: Path) -> Spool:
    """Writes prompts into a folder, one at a time.

    Args:
        prompts: In any form that `to_messages` reads.
        folder: An existing, empty one.
    """
    refused: dict[int, RequestError] = {}
    count = 0
    with ExitStack() as stack:
        pictures = stack.enter_context(_PictureWriter(folder / _PICTURES, shared=isinstance(prompts, (list, tuple))))
        files = [
            stack.enter_context((folder / PROMPT_PATTERN.replace("*", f"{n:02}")).open("wb"))
            for n in range(_PROMPT_FILES)
        ]
        for index, prompt in enumerate(prompts):
            count += 1
            try:
                files[index % _PROMPT_FILES].write(_line(index, prompt, pictures))
            except RequestError as error:
                refused[index] = error
    return Spool(folder, count, refused)


def _line(index: int, prompt: Any, pictures: _PictureWriter) -> bytes:
    messages = to_messages(prompt)
    references = [pictures.reference(reference) for reference in image_references(messages)]
    if references:
        messages = replace_images(messages, references)
    try:
        return dumps({"custom_id": str(index), "body": {"messages": messages}}) + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the prompt cannot be written as JSON: {error}") from error


class RestorePictures:
    """A function for `beam.Map`: puts a `SpooledPicture` where `spool_prompts` has put a mark.

    Args:
        folder: That of the spool.
    """

    def __init__(self, folder: Path) -> None:
        self._file = str(folder / _PICTURES)

    def __call__(self, request: ChatRequest | FailedRequest) -> ChatRequest | FailedRequest:
        """The request with its pictures; one that has failed is handed on."""
        if isinstance(request, FailedRequest) or not (references := image_references(request.body["messages"])):
            return request
        restored: list[Any] = [
            SpooledPicture(self._file, reference[_MARK]) if isinstance(reference, dict) else reference
            for reference in references
        ]
        return replace(request, body={**request.body, "messages": replace_images(request.body["messages"], restored)})


def _outcome(row: dict[str, Any]) -> Outcome:
    if row["error"] is None:
        return Completion(row["custom_id"], row["response"]["body"])
    return FailedRequest(row["custom_id"], ErrorKind(row["error"]["code"]), row["error"]["message"])
