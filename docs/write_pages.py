"""Writes the pages of this folder that are made from the code: `python docs/write_pages.py`.

A test compares them with what lies here, so that none of them is ever behind the code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

from megarl.config.describe import Description, descriptions

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


def configuration() -> str:
    """Every key of a run, a section for each group of keys."""
    page = ["# Configuration", "", *_CONFIGURATION]
    groups: dict[str, list[Description]] = {}
    for found in descriptions().values():
        groups.setdefault(found.key.rpartition(".")[0], []).append(found)
    for group, keys in groups.items():
        page += [f"## {group}", "", "| key | meaning | default | unit | allowed | also accepted |"]
        page += ["| --- | --- | --- | --- | --- | --- |"]
        for key in keys:
            spellings = ", ".join(f"`{name}`" for name in key.spellings)
            cells = (f"`{key.key}`", key.meaning, f"`{key.default}`", key.unit, key.allowed or key.kind, spellings)
            page.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        page += [""]
    return "\n".join(page)


_MADE = "Made from the docstrings by `python docs/write_pages.py`."
_CONFIGURATION = """\
Made from the comments of `megarl/config/schema/` by `python docs/write_pages.py`. `megarl config --help KEY` prints a
row of it; `megarl config recipe=NAME` prints the values that a run gets.

Later layers win: the defaults below, a preset (`model=NAME`, `layout=GPUSxGB`), a recipe (`recipe=NAME`), your own file
(`--config FILE`), the command line. A default `= other.key` follows that key unless it is set; `null` leaves a key
open. An unknown key and a value of another type or outside of its range are refused before anything starts, and so is a
typed key that would do nothing.

The groups `actor`, `rollout`, `ref` and `model` are verl's; `actor_rollout_ref.` in front of a key is accepted and
dropped. [coming_from_verl.md](coming_from_verl.md) has the differences.

""".splitlines()
PAGES: dict[str, Callable[[], str]] = {"files.md": files, "configuration.md": configuration}


def _docstring(path: Path) -> str:
    found = ast.get_docstring(ast.parse(path.read_text()))
    assert found, f"{path} has no docstring"
    return found


def _first_line(path: Path) -> str:
    return _docstring(path).partition("\n")[0].replace("|", r"\|")


if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make())
