"""The standard runs of suite.yaml, with the published rows that stand beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).parent


class Standard(NamedTuple):
    """One run of the suite."""

    name: str
    words: list[str]
    prompt_tokens: float
    response_tokens: float
    anchors: list[str]  # a sentence each


def suite(names: str) -> list[Standard]:
    """ "all", or names with commas between.  ValueError for a name that it has not."""
    runs = yaml.safe_load((HERE / "suite.yaml").read_text())["runs"]
    known = {run["name"]: run for run in runs}
    chosen = list(known) if names == "all" else names.split(",")
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"--suite {unknown[0]}: expected all, or some of {', '.join(known)}")
    published = yaml.safe_load((HERE.parent / "published.yaml").read_text())
    return [_standard(known[name], published) for name in chosen]


def _standard(run: dict[str, Any], published: dict[str, Any]) -> Standard:
    rows, sources = {row["name"]: row for row in published["rows"]}, published["sources"]
    anchors = [_sentence(rows[name], sources) for name in run["anchors"]]
    if "beside" in run:
        anchors.append(f"of these: {run['beside']}")
    return Standard(run["name"], run["words"], run["prompt_tokens"], run["response_tokens"], anchors)


def _sentence(row: dict[str, Any], sources: dict[str, str]) -> str:
    values = ", ".join(f"{key} {value}" for key, value in row["published"].items())
    return f"published: {row['name']} ({row['kind']}, {row['gpu']}): {values} ({sources[row['source']]})"
