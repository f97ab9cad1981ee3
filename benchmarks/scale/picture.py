"""The picture of bench_scale.py: seconds of a call over ranks, measured and modelled, and what the driver holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

LINES = (  # kind, what, column, name, how it is drawn
    ("ranks", "empty call", "seconds", "measured: ranks of a run, here", "o"),
    ("hollow", "empty call", "seconds", "measured: driver with hollow machines, here", "s"),
    ("hollow", "empty call", "model", "model of that", "--"),
    ("model", "empty call", "model", "model: an empty call in a cluster", "-"),
    ("model", "calls of a step", "model", "model: all calls of a step, with tensors", "-"),
)


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write it; a line without a row is left out."""
    figure = Figure(figsize=(10.5, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    calls, holds = figure.subplots(1, 2)
    for colour, (kind, what, column, name, how) in zip(("C0", "C1", "C2", "C3", "C4"), LINES, strict=False):
        xs, ys = series(rows, kind, what, column)
        if xs:
            calls.plot(xs, ys, how, color=colour, ms=5, lw=1.6, label=name)
    calls.set(xscale="log", yscale="log", xlabel="ranks")
    calls.set_title("Seconds of a call to all ranks", fontsize=10, loc="left")
    calls.legend(fontsize=8, frameon=False)
    for colour, column in zip(("C0", "C1", "C2", "C3", "C4"), ("driver's MB", "sockets"), strict=False):
        xs, ys = series(rows, "model", "calls of a step", column)
        holds.plot(xs, ys, "-", color=colour, lw=1.6, label=column)
    holds.set(xscale="log", yscale="log", xlabel="ranks")
    holds.set_title("What the driver holds", fontsize=10, loc="left")
    holds.legend(fontsize=8, frameon=False)
    for axes in (calls, holds):
        axes.grid(alpha=0.25, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(str(file))


def series(rows: Sequence[dict[str, Any]], kind: str, what: str, column: str) -> tuple[list[int], list[float]]:
    """Ranks, and the column's values, of the rows that have it."""
    found = [row for row in rows if (row["kind"], row["what"]) == (kind, what) and row.get(column) is not None]
    return [row["ranks"] for row in found], [row[column] for row in found]
