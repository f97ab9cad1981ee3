"""What the metrics mean and how they are read: from the table of the loss layer's page, which the package holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import megarl


def meaning_of(metric: str) -> list[str]:
    """[what it is, how to read it], the latter only if the table says it; [] for a metric that is not in the table."""
    return next((list(words) for pattern, words in _table() if fnmatch(metric, pattern)), [])


@cache
def _table() -> list[tuple[str, tuple[str, ...]]]:
    return list(_rows((Path(megarl.__file__).parent / "algo" / "README.md").read_text(encoding="utf-8")))


def _rows(page: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each name of the first column with the words of the others; NAME and an age stand for any."""
    table = page.partition("\n### All of them\n")[2].partition("\n## ")[0]
    for line in table.splitlines():
        names, *cells = re.split(r"(?<!\\)\|", line)[1:-1] or [""]
        words = tuple(cell.replace("`", "").replace("\\|", "|").strip() for cell in cells if cell.strip())
        for name in re.findall(r"`([^`]+)`", names):
            yield re.sub(r"NAME|age_\w+", "*", name), words
