"""Reads tables that are written as text: a line is a row, and | is between its cells."""

from __future__ import annotations

from itertools import product


def rows(table: str) -> list[list[str]]:
    """The cells of each line of a table, without comments."""
    lines = (line for line in table.splitlines() if line and not line.startswith("#"))
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def places(table: str) -> dict[str, tuple[str, int | str | None]]:
    """Other key -> our key, and the index in its list or the name in its mapping if the key is one entry of it.

    OUR GROUP | GROUPS of others | THEIR=OUR names, or names that both have; NAME@ENTRY is such an entry.
    OUR GROUP | the same of names without a group
    """
    found: dict[str, tuple[str, int | str | None]] = {}
    for ours, *groups, names in rows(table):
        for group, name in product(" ".join(groups).split() or [""], names.split()):
            theirs, _, own = name.partition("=")
            key, _, entry = f"{ours}.{own or theirs}".partition("@")
            found[f"{group}.{theirs}".lstrip(".")] = key, int(entry) if entry.isdecimal() else entry or None
    return found
