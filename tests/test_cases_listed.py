"""CASES.md says of every reported case which tests show the right outcome; what it says is true."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = [f"C{number:02}" for number in range(1, 94)]
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def listed() -> dict[str, str]:
    """The last column of each case's line."""
    rows = (line.strip("| ").split(" | ", 2) for line in (HERE / "CASES.md").read_text(encoding="utf-8").splitlines())
    found = [(row[0], row[2]) for row in rows if len(row) == 3 and re.fullmatch(r"C\d\d", row[0])]
    assert len(dict(found)) == len(found), "a case has two lines"
    return dict(found)


@cache
def docstrings_of(file: str) -> dict[str, str]:
    """The tests of a file with their docstrings."""
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {node.name: ast.get_docstring(node) or "" for node in functions if node.name.startswith("test_")}


def test_every_case_has_a_line() -> None:
    assert list(listed()) == CASES


@pytest.mark.parametrize("case", CASES)
def test_the_tests_of_a_case_exist_and_one_of_them_names_it(case: str) -> None:
    said = listed()[case]
    named = _TEST.findall(said)
    if not named:
        assert re.match(r"(does not apply|left open): .", said), "neither a test nor a reason"
        return
    assert [f"{file}::{name}" for file, name in named if name not in docstrings_of(file)] == []
    docstrings = [docstrings_of(file)[name] for file, name in named]
    assert any(case in text for text in docstrings), f"no docstring of {case}'s tests names it"


def test_a_number_in_a_docstring_is_that_of_a_case_which_exists() -> None:
    files = [path.relative_to(HERE).as_posix() for path in HERE.rglob("test_*.py")]
    numbers = {n for file in files for text in docstrings_of(file).values() for n in re.findall(r"\bC\d\d\b", text)}
    assert numbers == set(CASES)
