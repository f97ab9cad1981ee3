"""Iterations that a policy needs to come near a teacher: learning from it (distillation), and from rewards (GRPO).

Runs recipes quickstart_distill and quickstart_grpo in the present folder, or goes on where runs/ holds them already.
Both begin with the same policy and have as many completions in an iteration; the accuracy on held-out prompts is
measured every other iteration.  The teacher is that of quickstart_distill.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common import page
from megarl.config import load_config
from megarl.metrics.reading.jsonl import read_series
from megarl.trainer.build import optimizer_steps
from megarl.trainer.recipes.quickstart_distill import score

NEAR = 0.02  # in accuracy, below the teacher
TEACHER = "sums"
RUNS = {"distillation": "quickstart_distill", "GRPO": "quickstart_grpo"}  # name -> recipe
QUICK = ("trainer.default_local_dir=runs/quick", "trainer.total_training_steps=4")


def words(name: str, more: Sequence[str] = ()) -> list[str]:
    """The command line of a run, behind `megarl`."""
    run = f"trainer.experiment_name=bench_{RUNS[name]}"
    return ["train", f"recipe={RUNS[name]}", "trainer.test_freq=2", run, *more]


def first_near(scores: tuple[Sequence[int], Sequence[float]], teacher: float) -> int | None:
    """The first iteration, of (iterations, accuracies), with an accuracy near the teacher's; None: there is none."""
    return next((step for step, value in zip(*scores, strict=True) if value >= teacher - NEAR), None)


def near_for_good(scores: tuple[Sequence[int], Sequence[float]], teacher: float) -> int | None:
    """The first iteration from which on every accuracy is near the teacher's; None: the last one is not."""
    found = None
    for step, value in reversed([*zip(*scores, strict=True)]):
        if value < teacher - NEAR:
            break
        found = step
    return found


def result(runs: Path, teacher: float) -> page.Result:
    """What the runs below `runs` left."""
    rows: list[dict[str, Any]] = []
    ratios = {"accuracy_teacher": teacher}
    for name in RUNS:
        config, _ = load_config(words(name)[1:])
        scores = read_series(runs / f"bench_{RUNS[name]}" / "metrics.jsonl")["val/score"]
        first, from_then = first_near(scores, teacher), near_for_good(scores, teacher)
        row: dict[str, Any] = {"learns by": name}
        row |= {"completions in an iteration": config.data.train_batch_size * config.rollout.n}
        row |= {"optimizer steps in one": optimizer_steps(config, config.actor, 1)}
        row |= {"iterations": scores[0][-1], "accuracy before": scores[1][0], "after": scores[1][-1]}
        row |= {"best": max(scores[1]), "first iteration near the teacher": "none" if first is None else first}
        row |= {"for good": "none" if from_then is None else from_then}
        rows.append(row)
        if first is not None:
            ratios[f"iterations_{name.lower()}"] = first
    notes = [f"near: at most {NEAR} below the teacher's {teacher:.4f} on the same held-out prompts"]
    title = "Distillation beside GRPO on the quickstart's task"
    return page.Result("distill", "cpu", {"test_freq": 2}, rows, ratios, notes, title)


def work(options: argparse.Namespace) -> page.Result:
    """Run both."""
    if options.device != "cpu":
        raise ValueError(f"--device {options.device}: the quickstart is a CPU's; expected --device cpu")
    more = QUICK if options.quick else ()
    for name in RUNS:
        subprocess.run([sys.executable, "-m", "megarl", *words(name, more)], check=True)
    config, _ = load_config(words("distillation")[1:])
    return result(Path("runs/quick" if options.quick else "runs"), score(config, TEACHER))


if __name__ == "__main__":
    raise SystemExit(page.run(work, page.arguments(__doc__)))
