"""The curves of a page: which metrics stand together, and series that are short enough for a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from megarl.metrics.reading.jsonl import Series
from megarl.metrics.report.meanings import meaning_of

MAX_POINTS = 600  # of a curve: more than a screen has columns for it
MAX_REST = 120  # panels of metrics that no group names
EXACT = (
    "*/lr",
    "*coef*",
    "training/epoch",
    "training/global_step",
    "val*",
    "audit/*",
)  # never smoothed: no noise of steps


@dataclass(frozen=True)
class Panel:
    """A diagram.  `metrics` may contain patterns; metrics that a run does not have are left out."""

    title: str
    metrics: tuple[str, ...]
    log: bool = False


GROUPS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Score",
        (
            Panel("Held-out score", ("val/score", "val-core/*")),
            Panel("Accuracy on pairs", ("val/accuracy", "rm/accuracy", "dpo/accuracy")),
            Panel("Rewards of chosen and rejected answers", ("val/chosen", "val/rejected", "*/chosen", "*/rejected")),
            Panel("Lead of the chosen answers", ("val/margin", "rm/margin", "dpo/margin")),
            Panel(
                "Trained reward and audit since the start", ("audit/score_gain", "audit/gain", "audit/promised_gain")
            ),
            Panel("Training score", ("critic/score/mean",)),
            Panel("Parts of the reward", ("reward/*",)),
        ),
    ),
    (
        "Training",
        (
            Panel("Loss", ("actor/pg_loss", "actor/loss", "sft/loss", "rm/loss", "dpo/loss", "val/loss")),
            Panel("KL to the reference and to the old policy", ("actor/kl_loss", "actor/ppo_kl", "actor/reward_kl*")),
            Panel("Entropy", ("actor/entropy",)),
            Panel(
                "Gradient norm",
                ("actor/grad_norm", "critic/grad_norm", "sft/grad_norm", "rm/grad_norm", "dpo/grad_norm"),
            ),
            Panel("Share of clipped tokens", ("actor/pg_clipfrac*", "critic/vf_clipfrac")),
            Panel("Learning rate", ("actor/lr", "critic/lr", "sft/lr", "rm/lr", "dpo/lr")),
        ),
    ),
    (
        "Value and advantage",
        (
            Panel("Value loss", ("critic/vf_loss",)),
            Panel("Explained variance of the returns", ("critic/vf_explained_var",)),
            Panel("Advantages", ("critic/advantages/max", "critic/advantages/std", "critic/advantages/min")),
        ),
    ),
    (
        "Rollout",
        (
            Panel("Response length, tokens", ("response_length/mean", "response_length/max", "response_length/min")),
            Panel("Share of answers that a limit ended", ("response_length/clip_ratio",)),
            Panel("Log-prob gap, server to trainer", ("rollout_corr/log_prob_gap_*",), log=True),
            Panel("Correction of the rollout", ("rollout_corr/ess", "rollout_corr/share_*")),
            Panel("Age of the tokens, pushes", ("off_policy/token_age/mean", "off_policy/token_age/p*")),
            Panel("Tokens by age", ("off_policy/token_age/share/*",)),
            Panel("Lag of the samples, pushes", ("off_policy/version_lag/*",)),
            Panel("Shares of idle time", ("rollout/idle_share", "rollout/servers_idle_share")),
            Panel("Requests on servers", ("servers/running", "servers/waiting")),
            Panel("Fullest KV cache", ("servers/kv_share",)),
            Panel("Share of the servers' tokens that was wasted", ("rollout/tokens_wasted_share*",)),
            Panel("Turns of an episode", ("agent/turns/*",)),
            Panel("Groups lost and dropped", ("rollout/lost", "rollout/dropped_share")),
        ),
    ),
    (
        "Speed",
        (
            Panel("Tokens per second and device", ("perf/throughput",)),
            Panel("Model FLOPs utilization", ("perf/mfu*", "*/mfu")),
            Panel("GPU memory at its fullest, GB", ("perf/max_memory_*",)),
            Panel("Host memory, GB", ("perf/cpu_memory_used_gb",)),
            Panel("Seconds per step", ("timing_s/step",)),
            Panel("Push of the weights, seconds", ("timing_s/push/*",)),
            Panel("Share of the step outside all stages", ("perf/unaccounted",)),
        ),
    ),
)


def groups_of(runs: Sequence[Series]) -> list[dict[str, Any]]:
    """Groups of panels with the curves of each run.

    [{"title", "open": bool, "panels": [{"title", "log", "curves": [{"name", "exact": bool, "meaning": [words],
    "runs": [{"x", "y"} or None]}]}]}].  A metric that no group names has a panel of its own in the last group, which is
    closed; so has one of a panel in which all is 0 in all steps.
    """
    groups, named = [], set()
    known = {name for series in runs for name in series}
    for title, panels in GROUPS:
        drawn = []
        for panel in panels:
            names = [n for n in _matching(panel.metrics, known) if n not in named]
            if any(any(series[name][1]) for series in runs for name in names if name in series):
                named |= set(names)
                drawn.append(_panel(panel.title, names, runs, log=panel.log))
        if drawn:
            groups.append({"title": title, "open": True, "panels": drawn})
    timed = {name for name in known if name.startswith("timing_s/")}  # the stages have a picture of their own
    rest = sorted(known - named - timed)[:MAX_REST]
    if rest:
        panels_of_rest = [_panel(name, [name], runs) for name in rest]
        groups.append({"title": "All other metrics", "open": False, "panels": panels_of_rest})
    return groups


def stages_of(series: Series) -> dict[str, Any]:
    """{"steps": [...], "stages": [{"name", "s": [seconds, ...]}]}: stages of each step, the longest first.

    What is outside all stages is the stage "unaccounted".  Stages inside another one ("push/send") are left out.
    """
    steps, whole = series.get("timing_s/step", ([], []))
    steps, whole = thinned(steps, whole)
    rows = {}
    for name in (n for n in series if n.startswith("timing_s/") and n.count("/") == 1 and n != "timing_s/step"):
        known = dict(zip(*series[name], strict=True))
        rows[name.partition("/")[2]] = [known.get(step, 0.0) for step in steps]
    known = dict(zip(*series.get("perf/unaccounted", ([], [])), strict=True))
    rows["unaccounted"] = [known.get(step, 0.0) * s for step, s in zip(steps, whole, strict=True)]
    longest = sorted(rows.items(), key=lambda row: -sum(row[1]))
    return {"steps": steps, "stages": [{"name": name, "s": [_short(s) for s in row]} for name, row in longest]}


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most MAX_POINTS points: of each of equal parts the smallest and the largest value, so that no peak is lost."""
    if len(steps) <= MAX_POINTS:
        return list(steps), list(values)
    num_parts = MAX_POINTS // 2
    kept: set[int] = set()
    for part in range(num_parts):
        places = range(part * len(steps) // num_parts, (part + 1) * len(steps) // num_parts)
        kept |= {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
    order = sorted(kept)
    return [steps[at] for at in order], [values[at] for at in order]


def _panel(title: str, names: Sequence[str], runs: Sequence[Series], *, log: bool = False) -> dict[str, Any]:
    return {"title": title, "log": log, "curves": [_curve(name, runs) for name in names]}


def _curve(name: str, runs: Sequence[Series]) -> dict[str, Any]:
    is_exact = any(fnmatch(name, pattern) for pattern in EXACT)
    points = [_points(*series[name]) if name in series else None for series in runs]
    return {"name": name, "exact": is_exact, "meaning": meaning_of(name), "runs": points}


def _points(steps: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    x, y = thinned(steps, values)
    return {"x": x, "y": [_short(value) for value in y]}


def _matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    ordered = sorted(names)
    return list(dict.fromkeys(name for pattern in patterns for name in ordered if fnmatch(name, pattern)))


def _short(value: float) -> float | None:
    """Five digits are more than a curve shows; JSON has no NaN."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
