"""Five policy losses, each with an advantage estimator of its own, on the quickstart's task: what each reaches.

Runs `megarl train recipe=quickstart` five times in the present folder, or goes on where runs/ holds them already, and
draws the accuracy on held-out prompts over the steps in one picture.  About a quarter of an hour on two cores; --quick:
six steps of each, in runs/quick.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common import page
from megarl.metrics.reading.jsonl import read_series

# One step more than those in which ppo's critic learns alone.
QUICK = ("trainer.default_local_dir=runs/quick", "trainer.total_training_steps=6", "trainer.test_freq=3")
RUNS = {  # name of the run -> what is set besides the recipe
    "quickstart": (),  # ppo with gae
    "cispo_rloo": ("algorithm.policy_loss_fn=cispo", "algorithm.adv_estimator=rloo"),
    "gspo_grpo": (
        "algorithm.policy_loss_fn=gspo",
        "algorithm.adv_estimator=grpo",
        "actor.loss_agg_mode=seq-mean-token-mean",
    ),
    "dppo_tv_opo": ("algorithm.policy_loss_fn=dppo_tv", "algorithm.adv_estimator=opo"),
    "sapo_rpp_baseline": (
        "algorithm.policy_loss_fn=sapo",
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
    ),
}


def words(name: str) -> list[str]:
    """The command line of a run, behind `megarl`."""
    return ["train", "recipe=quickstart", *RUNS[name], f"trainer.experiment_name={name}"]


def picture(runs: Path, file: Path) -> None:
    """val/score over the steps of every run below `runs`."""
    figure = Figure(figsize=(7.2, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for colour, name in zip(("C0", "C1", "C2", "C3", "C4"), RUNS, strict=True):
        steps, scores = read_series(runs / name / "metrics.jsonl")["val/score"]
        label = f"{' + '.join(chosen(runs, name))}  {scores[-1]:.3f}"
        axes.plot(steps, scores, color=colour, lw=1.8, marker="o", ms=3.5, label=label)
    axes.axhline(0.9, color="#999999", lw=0.8, ls="--")
    axes.set_title("Greedy accuracy on 256 held-out prompts", fontsize=10, loc="left")
    axes.set_xlabel("iteration", fontsize=9)
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8.5, frameon=False, loc="lower right")
    figure.savefig(str(file))


def chosen(runs: Path, name: str) -> tuple[str, str]:
    """Loss and estimator, as the run itself wrote them down."""
    algorithm = yaml.safe_load((runs / name / "config.yaml").read_text())["algorithm"]
    return algorithm["policy_loss_fn"], algorithm["adv_estimator"]


def result(runs: Path) -> page.Result:
    """What every run below `runs` says of itself."""
    keys = ("accuracy_before", "accuracy_after", "accuracy_transformers", "pushes", "pushes_verified")
    rows = []
    for name in RUNS:
        summary = json.loads((runs / name / "summary.json").read_text())
        loss, estimator = chosen(runs, name)
        rows.append({"run": name, "loss": loss, "estimator": estimator, **{key: summary[key] for key in keys}})
    legend = "Greedy accuracy on 256 held-out prompts in 60 iterations; all other settings are those of the recipe."
    return page.Result(
        "losses",
        "cpu",
        {},
        rows,
        {f"accuracy_{row['run']}": row["accuracy_after"] for row in rows},
        [legend, f"![accuracy]({page.PICTURE})"],
        "Five losses on the quickstart",
        draw=partial(picture, runs),
    )


def work(options: argparse.Namespace) -> page.Result:
    """Run all five."""
    if options.device != "cpu":
        raise ValueError(f"--device {options.device}: the quickstart is a CPU's; expected --device cpu")
    for name in RUNS:
        subprocess.run([sys.executable, "-m", "megarl", *words(name), *(QUICK if options.quick else ())], check=True)
    return result(Path("runs/quick" if options.quick else "runs"))


if __name__ == "__main__":
    raise SystemExit(page.run(work, page.arguments(__doc__)))
