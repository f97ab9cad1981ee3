"""Draws what the runs of both examples with agents in runs/ have learnt: `python examples/curves.py FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megarl.metrics.reading.jsonl import read_series

CURVES = {  # run -> title, and the label of each metric
    "calculator": (
        "Calculator",
        {"critic/score/mean": "right", "val/score": "right, greedy, held out", "agent/tool_calls": "calls of tools"},
    ),
    "guessing_game": (
        "Guessing game",
        {"critic/score/mean": "score (best plan: 0.71)", "reward/found": "number found"},
    ),
}


def main(file: str) -> None:
    figure = Figure(figsize=(8.4, 3.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (run, (title, metrics)) in zip(figure.subplots(1, len(CURVES)), CURVES.items(), strict=True):
        series = read_series(Path("runs") / run / "metrics.jsonl")
        for colour, (name, label) in zip(("C0", "C1", "C2", "C3", "C4"), metrics.items(), strict=False):
            axes.plot(*series[name], color=colour, lw=1.6, label=f"{label}  {series[name][1][-1]:.2f}")
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("iteration", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(file)


if __name__ == "__main__":
    main(sys.argv[1])
