"""The book in docs/: pages that are made from the code are up to date, and what others name exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from readme_blocks import code_spans
from test_floors import FLOORS
from write_pages import PAGES

ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_made_from_the_code_is_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "run: python docs/write_pages.py"


def test_the_floors_of_the_page_are_those_that_are_checked() -> None:
    table = ARCHITECTURE.partition("## The life of a sample")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][2:]
    assert {int(floor): code_spans(rooms) for floor, rooms in rows} == {f: rooms.split() for f, rooms in FLOORS.items()}


def test_every_function_on_a_samples_way_exists() -> None:
    steps = [span.split(" : ") for span in code_spans(ARCHITECTURE) if " : " in span]
    assert len(steps) >= 15
    for path, name in steps:
        scope: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
        for part in name.split("."):
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            found = [node for node in scope if isinstance(node, kinds) and node.name == part]
            assert found, f"{path} has no {name}"
            scope = found[0].body
