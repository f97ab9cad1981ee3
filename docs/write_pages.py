"""Writes the pages of this folder that are made from the code: `python docs/write_pages.py`.

A test compares them with what lies here, so that none of them is ever behind the code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "megarl"


def files() -> str:
    """Every file of the package with the first line of its docstring, a section for each folder."""
    page = ["# The files of the package", "", _MADE, ""]
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        paths = sorted(folder.glob("*.py"))
        page += [f"## {folder.relative_to(PACKAGE.parent)}/", ""]
        if (init := folder / "__init__.py") in paths:
            page += [_docstring(init).partition("\n\n")[0].replace("\n", " "), ""]
            paths.remove(init)
        if paths:
            page += ["| file | what it is |", "| --- | --- |"]
            page += [f"| `{path.name}` | {_first_line(path)} |" for path in paths]
            page += [""]
    return "\n".join(page)


_MADE = "Made from the docstrings by `python docs/write_pages.py`."
PAGES: dict[str, Callable[[], str]] = {"files.md": files}


def _docstring(path: Path) -> str:
    found = ast.get_docstring(ast.parse(path.read_text()))
    assert found, f"{path} has no docstring"
    return found


def _first_line(path: Path) -> str:
    return _docstring(path).partition("\n")[0].replace("|", r"\|")


if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make())
