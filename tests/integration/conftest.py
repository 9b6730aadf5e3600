"""Real servers for the tests of this folder, started once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.llama_server import REQUIREMENTS, LlamaServer


@pytest.fixture(scope="session")
def llama_requirements() -> None:
    """Skips the test where llama.cpp's server cannot run."""
    for module in REQUIREMENTS:
        pytest.importorskip(
            module, reason=f"llama.cpp's server needs {', '.join(REQUIREMENTS)}: no {module}", exc_type=ImportError
        )


@pytest.fixture(scope="session")
def llama_server(llama_requirements: None) -> Iterator[LlamaServer]:
    """llama.cpp's server on a tiny vision-language model, open to all."""
    with LlamaServer() as server:
        yield server
