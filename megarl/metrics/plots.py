"""Draws the learning curves of a run from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from megarl.metrics.jsonl import read_lines

Series = dict[str, tuple[list[int], list[float]]]  # metric -> steps, values

COLOURS = ("#2f6f9f", "#d9822b", "#3d8c5f", "#a64d79", "#6b6b6b")


@dataclass(frozen=True)
class Panel:
    """A diagram.  `metrics` may contain patterns; metrics that the file does not have are left out."""

    title: str
    metrics: tuple[str, ...]
    log: bool = False
    limits: tuple[float, float] | None = None


PANELS: tuple[Panel, ...] = (
    Panel("Score on held-out prompts and training score", ("val/score", "critic/score/mean")),
    Panel("Supervised loss", ("sft/loss", "val/loss")),
    Panel("Policy loss", ("actor/pg_loss",)),
    Panel("Distance of the policy", ("actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty")),
    Panel("Divergence from the teachers", ("distill/divergence", "distill/*/divergence")),
    Panel("Log-probs of the teachers minus those of the policy", ("distill/*/log_prob_gap",)),
    Panel("Entropy", ("actor/entropy",)),
    Panel("Response length in tokens", ("response_length/mean", "response_length/max")),
    Panel(
        "Log-prob gap, server to trainer", ("rollout_corr/log_prob_gap_mean", "rollout_corr/log_prob_gap_max"), log=True
    ),
    Panel("Value loss", ("critic/vf_loss",)),
    Panel("Explained variance of the returns", ("critic/vf_explained_var",), limits=(-1.05, 1.05)),
    Panel("Share of clipped tokens", ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac")),
    Panel("Gradient norm", ("actor/grad_norm", "critic/grad_norm", "sft/grad_norm")),
    Panel("Seconds per step", ("timing_s/*",)),
)
COLUMNS = 3


def learning_curve(metrics_jsonl: Path | str, png_path: Path | str, *, title: str = "") -> None:
    """Draw every panel of PANELS for which the file has numbers.

    Raises: ValueError for a file without any of these metrics.
    """
    series = read_series(Path(metrics_jsonl))
    drawn = [(panel, names) for panel in PANELS if (names := _names(panel, series))]
    if not drawn:
        raise ValueError(f"{metrics_jsonl}: holds none of the metrics of a learning curve")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, only needed at the end of a run
    from matplotlib.figure import Figure

    rows = -(-len(drawn) // COLUMNS)
    width, height = 4.6 * min(COLUMNS, len(drawn)), 2.9 * rows + 0.4
    figure = Figure(figsize=(width, height), dpi=130)
    FigureCanvasAgg(figure)
    # In inches, with room for numbers of five digits: to measure the text, as layouts do, draws everything twice.
    figure.subplots_adjust(0.5 / width, 0.3 / height, 1 - 0.15 / width, 1 - 0.65 / height, wspace=0.17, hspace=0.25)
    for i, (panel, names) in enumerate(drawn):
        _draw(figure.add_subplot(rows, min(COLUMNS, len(drawn)), i + 1), panel, {name: series[name] for name in names})
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.savefig(str(png_path))


def read_series(path: Path) -> Series:
    """Each metric with its steps; nulls are left out; if a step was logged twice, the last value counts."""
    found: dict[str, dict[int, float]] = {}
    for row in read_lines(path):
        for name, value in row.items():
            if name not in ("step", "time") and value is not None:
                found.setdefault(name, {})[row["step"]] = value
    return {name: (sorted(points), [points[s] for s in sorted(points)]) for name, points in found.items()}


def _names(panel: Panel, series: Series) -> list[str]:
    names = [name for pattern in panel.metrics for name in series if fnmatch(name, pattern)]
    return names[: len(COLOURS)] if len(names) <= len(COLOURS) else _largest(names, series)


def _largest(names: Sequence[str], series: Series) -> list[str]:
    """The metrics with the largest sums, as many as there are colours: the slowest stages."""
    return sorted(names, key=lambda name: -sum(series[name][1]))[: len(COLOURS)]


def _draw(axes: Any, panel: Panel, series: Series) -> None:
    for colour, (name, (steps, values)) in zip(COLOURS, series.items(), strict=False):
        label = f"{name}  {values[-1]:.3g}"
        if len(values) <= 30:
            axes.plot(steps, values, color=colour, lw=1.6, marker="o", ms=3, label=label)
        else:  # values thin, moving average bold
            axes.plot(steps, values, color=colour, lw=0.7, alpha=0.3)
            axes.plot(steps, smooth(values), color=colour, lw=1.8, label=label)
    axes.set_title(panel.title, fontsize=9.5, loc="left")
    axes.tick_params(labelsize=8, length=2)
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if panel.limits:
        axes.set_ylim(*panel.limits)
    if panel.log and any(v > 0 for _, values in series.values() for v in values):
        axes.set_yscale("log")
    axes.legend(fontsize=7.5, frameon=False, loc="best")


def smooth(values: Sequence[float], window: int = 15) -> list[float]:
    """The centred moving average over `window` steps, fewer at the ends; it has no lag."""
    half = window // 2
    parts = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]
