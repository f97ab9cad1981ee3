"""The project of `megarl new --model smollm2`: what its runs learn, and its step beside a plain loop of transformers.

    python benchmarks/pretrained/bench_pretrained.py                   both parts
    python benchmarks/pretrained/bench_pretrained.py --parts speed     one of them

`curves`: GRPO from two seeds, PPO, DPO, LoRA, and GRPO with shuffled rewards; their accuracy in one picture.
`speed`: seconds of the rollout, of the update and of a whole step, which has a verified push of the weights here,
beside those of plain_side.py, in turns, --rounds times.
Both sides have the same model in float32, the same prompts and settings, 64 answers of at most 16 tokens, two cores.
The project is made in ./pretrained, where runs of `curves` that ended are not made again: half an hour for all, and
ten minutes for `speed`, on two cores.  --quick: one round of `speed`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.execute import execute
from benchmarks.common.page import PICTURE, ROOT, Result, arguments, run, with_rounds
from megarl.commands.new import Request, main
from megarl.metrics.reading.jsonl import read_lines, read_series

FOLDER = Path("pretrained")
RUNS = {  # name of the run -> its label, its command, and what is set besides train.yaml
    "real": ("GRPO", "train", ()),
    "seed_1": ("GRPO, another seed", "train", ("trainer.seed=1",)),
    "ppo": ("PPO", "train", ("recipe=ppo.yaml",)),
    "dpo": ("DPO, asked at its end", "dpo", ("recipe=dpo.yaml",)),
    "lora": ("GRPO, LoRA of rank 16", "train", ("recipe=lora.yaml",)),
    "shuffled": ("GRPO, shuffled rewards", "train", ("reward.shuffle=true",)),
}
COLOURS = ("C0", "C9", "C1", "C4", "C2", "C3")
PARTS = ("curves", "speed")
STEPS, WARMUP = 4, 1  # of a side in a round
ONLY_STEPS = (
    "data.val_files=[]",
    "data.shuffle=false",
    "trainer.check_export=false",
    "trainer.save_freq=-1",
    f"trainer.total_training_steps={STEPS}",
)
SPINS = "1000"  # of threads that wait, as megarl sets it: more than a core is free for would slow the plain loop
STAGES = {"rollout": "timing_s/gen", "update": "timing_s/update_actor", "step": "timing_s/step"}


def prepare() -> None:
    """The project with its rows and its model; one that is there is kept."""
    if not FOLDER.exists():
        main(Request(FOLDER, "sums", model="smollm2"))
    if not (FOLDER / "data/model").exists():
        execute([sys.executable, "task.py"], FOLDER / "task.log", {"PYTHONPATH": str(ROOT)})


def megarl(command: str, name: str, settings: tuple[str, ...], summary: str = "summary.json") -> dict[str, Any]:
    """The summary of a finished run of the project."""
    file = FOLDER / "runs" / name / summary
    if not file.exists():
        words = [*settings, f"trainer.experiment_name={name}"]
        words = words if any(word.startswith("recipe=") for word in words) else ["recipe=train.yaml", *words]
        call = [sys.executable, "-m", "megarl", command, *words]
        execute(call, FOLDER / f"{name}.log", {"PYTHONPATH": str(ROOT)}, timeout_s=3600)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def picture(lines: Sequence[tuple[str, Sequence[float], Sequence[float]]], file: Path) -> None:
    """Each line: its label, steps and shares of right answers."""
    figure = Figure(figsize=(7.2, 3.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for colour, (label, steps, scores) in zip(COLOURS, lines, strict=True):
        style = "--" if len(steps) == 2 else "-"  # nothing is known between its ends
        axes.plot(steps, scores, style, color=colour, lw=1.8, marker="o", ms=3.5, label=f"{label}  {scores[-1]:.3f}")
    axes.set_title("SmolLM2-135M-Instruct: share of 64 held-out sums that it gets right", fontsize=10, loc="left")
    axes.set_xlabel("step of 64 answers (DPO: of 32 pairs)", fontsize=9)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8.5, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(str(file))


def curves(result: Result) -> None:
    """The runs, into the result.  One of pairs asks no held-out question: its model is asked at its end."""
    keys = ("accuracy_before", "accuracy_after", "accuracy_transformers", "steps", "pushes", "pushes_verified")
    lines = list[tuple[str, Sequence[float], Sequence[float]]]()
    for name, (label, command, settings) in RUNS.items():
        summary = megarl(command, name, settings)
        if command == "dpo":
            asked = ("recipe=train.yaml", f"model.path=runs/{name}/hf")
            after = megarl("evaluate", f"{name}_test", asked, "evaluations/1/summary.json")["accuracy"]
            summary |= {"accuracy_before": result.rows[0]["accuracy_before"], "accuracy_after": after}
            lines.append((label, (0, summary["steps"]), (summary["accuracy_before"], after)))
        else:
            lines.append((label, *read_series(FOLDER / "runs" / name / "metrics.jsonl")["val/score"]))
        ended = datetime.fromtimestamp((FOLDER / "runs" / name / "summary.json").stat().st_mtime)
        row = {"run": label, **{key: summary.get(key) for key in keys}, "minutes": summary["wall_s"] / 60}
        row["ended"] = f"{ended:%Y-%m-%d %H:%M}"
        result.rows.append(row)
        result.ratios[f"accuracy_{name}"] = summary["accuracy_after"]
    result.notes.append("a run that had ended before the command began, see `ended`, was taken as it was")
    result.notes.append(f"![accuracy]({PICTURE})")
    result.draw = partial(picture, lines)


def speed(result: Result, rounds: int) -> None:
    """The rounds of both sides, into the result; a side's seconds are the mean of its steps after the first."""
    found: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for at in range(rounds):
        sides: dict[str, dict[str, float]] = {}
        for side in ("megarl", "plain") if at % 2 == 0 else ("plain", "megarl"):
            load = os.getloadavg()[0]
            steps = _megarl(at) if side == "megarl" else _plain(at)
            sides[side] = {key: statistics.mean(step[key] for step in steps[WARMUP:]) for key in steps[0]}
            result.rows.append({"round": at + 1, "side": side, **sides[side], "load before": load})
        for stage, values in found.items():
            values.append(sides["megarl"][stage] / sides["plain"][stage])
    for stage, values in found.items():
        result.ratios[stage] = statistics.median(values)
        result.notes.append(f"{stage}, megarl's seconds by the plain loop's: {', '.join(f'{v:.2f}' for v in values)}")


def _megarl(at: int) -> list[dict[str, float]]:
    shutil.rmtree(FOLDER / "runs" / f"speed_{at}", ignore_errors=True)  # measured in turns with the other side
    megarl("train", f"speed_{at}", ONLY_STEPS)
    rows = list(read_lines(FOLDER / "runs" / f"speed_{at}" / "metrics.jsonl"))
    keys = STAGES | {"score": "critic/score/mean"}
    return [{name: row[key] for name, key in keys.items()} for row in rows if "timing_s/step" in row]


def _plain(at: int) -> list[dict[str, float]]:
    command = [sys.executable, str(Path(__file__).with_name("plain_side.py")), str(STEPS)]
    execute(command, FOLDER / f"plain_{at}.log", {"GOMP_SPINCOUNT": SPINS})
    said: list[dict[str, float]] = json.loads((FOLDER / "plain.json").read_text())
    return said


def work(options: argparse.Namespace) -> Result:
    if options.device != "cpu":
        raise ValueError(f"--device {options.device}: the project is a CPU's; expected --device cpu")
    prepare()
    options.parts = ["speed"] if options.quick else options.parts
    result = Result("pretrained_" + "_".join(options.parts), "cpu", {}, title="A pretrained model on two cores")
    if "curves" in options.parts:
        curves(result)
    if "speed" in options.parts:
        speed(result, 1 if options.quick else options.rounds)
    return result


def parser() -> argparse.ArgumentParser:
    out = with_rounds(arguments(__doc__))
    out.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured (all)")
    return out


if __name__ == "__main__":
    raise SystemExit(run(work, parser()))
