"""How the modules hang together: dependencies point down only, and no module becomes a drawer."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import beam_llm

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "beam_llm"
MAX_LINES = 300
DRAWERS = {"utils", "util", "common", "base", "helpers", "helper", "misc"}

LAYERS = [
    # A module imports only from modules above it in this list. A new module is put in where it belongs.
    "version",
    "errors",
    "field_types",
    "process_limits",
    "worker_start",
    "local_run",
    "spill",
    "jsontext",
    "records",
    "failure_examples",
    "classify",
    "answers",
    "stopping",
    "retry",
    "limits",
    "pacing",
    "endpoints",
    "fingerprint",
    "sampling",
    "messages",
    "images.checks",
    "images.wholeness",
    "images.pixels",
    "images.policy",
    "images",
    "images.fetch",
    "images.storage",
    "images.loading",
    "images.encoder",
    "stores",
    "config",
    "api_key",
    "body",
    "connection",
    "watch",
    "course",
    "client",
    "stores.sqlite",
    "stores.redis",
    "stores.gcs",
    "files",
    "lines",
    "delimited",
    "parquet_rows",
    "sources",
    "formats",
    "formats.common_row",
    "formats.openai_batch",
    "formats.rows",
    "formats.row_results",
    "formats.parquet",
    "spool",
    "progress",
    "progress_bar",
    "metrics",
    "summary",
    "stored_answers",
    "channel",
    "driver",
    "process_drivers",
    "held_driver",
    "dofn",
    "encode_images",
    "transforms",
    "result_sinks",
    "ordered",
    "io",
    "preview",
    "result_folder",
    "flags",
    "options",
    "runner",
    "spooled_job",
    "compat",
    "simulator.script",
    "simulator.checks",
    "simulator.answers",
    "simulator.server",
    "simulator",
    "simulator.__main__",
    "",  # beam_llm/__init__.py
]

DEFERRED = {("stores", "stores.sqlite"), ("stores", "stores.redis"), ("stores", "stores.gcs")}
"""Imports that wait until a URL names the backend: its client library may not be installed."""

WITHOUT_BEAM = [
    *[
        "version",
        "errors",
        "field_types",
        "jsontext",
        "records",
        "classify",
        "stopping",
        "retry",
        "limits",
        "pacing",
        "endpoints",
        "fingerprint",
    ],
    *[
        "sampling",
        "messages",
        "images",
        "config",
        "body",
        "connection",
        "watch",
        "course",
        "client",
        "channel",
        "driver",
    ],
    *["formats", "formats.common_row", "formats.openai_batch", "formats.rows"],
    *["stores", "stores.sqlite", "stores.redis"],
    *["simulator", "simulator.script", "simulator.checks", "simulator.answers", "simulator.server"],
]
"""Everything async, and every decision in a plain function, can be used and tested without Beam."""


def path_of(module: str) -> Path:
    path = PACKAGE / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> list[str]:
    return sorted(module_of(path) for path in PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full names of all that a file imports when it runs, wherever in it the import stands."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {name for node in run_time_nodes(tree) for name in names_in(node)}


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from run_time_nodes(child)


def names_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import of {node.module}: write the whole name"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_dependencies(path: Path) -> set[str]:
    """The modules of the package that a file imports from; "" stands for the package itself."""
    known, found = set(modules()), set()
    for name in imported(path):
        if name.partition(".")[0] == PACKAGE.name:
            inner = name.partition(".")[2]
            found.add(inner if inner in known else inner.rpartition(".")[0])
    return found


def test_every_module_has_its_place_in_the_layers() -> None:
    assert modules() == sorted(LAYERS)


@pytest.mark.parametrize("module", LAYERS)
def test_dependencies_point_down_only(module: str) -> None:
    below = set(LAYERS[: LAYERS.index(module)])
    upward = own_dependencies(path_of(module)) - below - {above for by, above in DEFERRED if by == module}
    assert upward == set()


@pytest.mark.parametrize(("module", "backend"), sorted(DEFERRED))
def test_a_backend_is_imported_only_when_it_is_named(module: str, backend: str) -> None:
    at_the_top = {name for node in ast.parse(path_of(module).read_text()).body for name in names_in(node)}
    assert not any(name.startswith(f"{PACKAGE.name}.{backend}.") for name in at_the_top)
    assert backend in own_dependencies(path_of(module))


@pytest.mark.parametrize("module", WITHOUT_BEAM)
def test_what_beam_has_no_part_in_does_not_import_it(module: str) -> None:
    assert {name for name in imported(path_of(module)) if name.partition(".")[0] == "apache_beam"} == set()


def test_nothing_imports_the_command_line() -> None:
    """Beam pickles what is defined in a main script by value: a worker must need nothing of it."""
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")]
    assert [path for path in sources if any(name.startswith("pipelines") for name in imported(path))] == []


@pytest.mark.parametrize("module", LAYERS)
def test_a_module_is_short_enough_to_be_read_in_one_go(module: str) -> None:
    length = len(path_of(module).read_text(encoding="utf-8").splitlines())
    assert length <= MAX_LINES


def test_no_module_is_a_drawer() -> None:
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")]
    assert [path for path in sources if path.stem in DRAWERS or path.parent.name in DRAWERS] == []


def test_public_names_are_those_that_type_checkers_see() -> None:
    checked = next(node for node in ast.parse(path_of("").read_text()).body if isinstance(node, ast.If))
    named = {full.rpartition(".")[2]: full for node in checked.body for full in names_in(node)}
    assert sorted(beam_llm.__all__) == sorted([*named, "__version__"])
    for name, full in named.items():
        assert getattr(beam_llm, name) is getattr(import_module(full.rpartition(".")[0]), name)


def test_unknown_name_of_the_package_is_an_attribute_error() -> None:
    assert not hasattr(beam_llm, "ChatConfigs")


def test_the_package_and_its_simulator_start_without_beam() -> None:
    code = "import sys, beam_llm, beam_llm.simulator; sys.exit('apache_beam' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
