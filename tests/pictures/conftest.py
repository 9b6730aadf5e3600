"""The files, ready to be read."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.pictures.sources import heif_package, picture_files


@pytest.fixture(scope="session")
def files() -> dict[str, Path]:
    """All picture files by name; HEIC can be read from here on, by Pillow and by `beam_llm`."""
    found = picture_files()
    if folder := heif_package():
        sys.path.append(str(folder))
    importlib.import_module("pillow_heif").register_heif_opener()
    return found
