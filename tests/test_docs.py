"""The book in docs/: pages that are made from the code are up to date, and what others name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from readme_blocks import BOOK, code_spans
from test_floors import FLOORS
from write_pages import PAGES
from written_metrics import is_written

from megarl.metrics.advice.rules import RULES

ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_made_from_the_code_is_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "run: python docs/write_pages.py"


def test_the_floors_of_the_page_are_those_that_are_checked() -> None:
    table = ARCHITECTURE.partition("## The life of a sample")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][2:]
    assert {int(floor): code_spans(rooms) for floor, rooms in rows} == {f: rooms.split() for f, rooms in FLOORS.items()}


def test_every_function_that_a_page_names_with_its_file_exists() -> None:
    pages = (ARCHITECTURE, *(text for name, text in BOOK.items() if name.startswith("how_to_add/")))
    steps = [span.split(" : ") for text in pages for span in code_spans(text) if " : " in span]
    assert len(steps) >= 35
    for path, name in steps:
        scope: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
        for part in name.split("."):
            found = [node for node in scope if _name(node) == part]
            assert found, f"{path} has no {name}"
            scope = getattr(found[0], "body", [])


def _name(node: ast.stmt) -> str | None:
    """Of a class, a function, or a table."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", None)


def test_every_symptom_has_metrics_that_a_run_writes_and_advice_that_it_gives() -> None:
    text = BOOK["troubleshooting.md"].partition("## By symptom")[2].partition("\n## ")[0]
    assert all(word in text for word in ("flat", "dips", "collapses", "disagree", "memory", "idle"))
    metrics = [span for span in code_spans(text) if re.fullmatch(r"[a-z_]+(/[a-z_]+)+", span)]
    assert len(metrics) > 25
    assert not [metric for metric in metrics if not is_written(metric)]
    advice = [span for span in code_spans(text) if re.fullmatch(r"[a-z_]+", span)]
    assert len(advice) > 15
    assert set(advice) <= {rule.name for rule in RULES}
