"""bench_async.py, learning: the quickstart's sums with answers of a long tail, `ahead=0` beside `ahead=2`.

An answer is the sum and then dots, whose number the cold start draws from a lognormal law: 4 to 64 tokens.  The dots
teach nothing and cost time, as a long reasoning would.  The servers, of either engine, sleep in each decode step, so
that it is not the cores that bound the generation.
"""

from __future__ import annotations

import json
import random
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.async_training.reward import DOT
from benchmarks.async_training.sglang_sleep import installed
from benchmarks.common.execute import execute
from benchmarks.common.page import ROOT
from megarl.data.examples.tasks import write_task
from megarl.data.examples.tiny import write_tiny_model
from megarl.io.auth import SERVER_VARIABLE
from megarl.metrics.reading.jsonl import read_lines
from megarl.servers.launch import EngineLaunch, ServerCommand
from megarl.servers.server_process import ENGINES, ThisMachine
from megarl.servers.supervisor import Servers
from megarl.trainer.recipes.quickstart import MODEL, TASK

MEAN_DOTS, SPREAD, MOST_DOTS = 10.0, 1.0, 60  # of the cold start; SPREAD: of the logarithm
MOST_TOKENS = 64  # of an answer: digits, dots, the end
AHEAD = 2
SYNC, ASYNC = ("rollout.ahead=0",), (f"rollout.ahead={AHEAD}", "rollout.order=finished")
COLD_START_S, RUN_S = 3600.0, 3600.0


@dataclass(frozen=True)
class Setting:
    steps: int = 60
    warmup: int = 3  # steps before the clock counts
    rounds: int = 3
    epochs: int = 18  # of the cold start
    prompts: int = 64
    sleep_ms: float = 20.0  # of a decode step of the servers


USUAL = Setting()
QUICK = Setting(steps=4, warmup=1, rounds=1, epochs=1, prompts=16, sleep_ms=5.0)


def write_long_tail(folder: Path, seed: int = 0) -> None:
    """The quickstart's task with dots behind the answers of the cold start."""
    write_task(folder, TASK)
    rng, file = random.Random(seed), folder / "sft.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["response"] += DOT * dots(rng)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def dots(rng: random.Random) -> int:
    """Lognormal with the mean MEAN_DOTS, cut at MOST_DOTS."""
    return min(MOST_DOTS, round(MEAN_DOTS * rng.lognormvariate(-(SPREAD**2) / 2, SPREAD)))


def prepare(folder: Path, setting: Setting) -> Path:
    """Task, model and cold start; returns the model's folder."""
    write_long_tail(folder / "data")
    write_tiny_model(folder / "initial", MODEL)
    settings = {
        "sft.train_files": f"[{folder}/data/sft.jsonl]",
        "sft.epochs": setting.epochs,
        "sft.max_length": MOST_TOKENS + 16,
        "model.path": folder / "initial",
        "trainer.default_local_dir": folder / "runs",
        "trainer.experiment_name": "cold_start",
        "trainer.logger": "[jsonl]",
    }
    _megarl(["sft", "recipe=quickstart_sft", *_words(settings)], folder / "cold_start.log", {}, COLD_START_S)
    return folder / "runs/cold_start/hf"


def train_words(model: Path, folder: Path, name: str, setting: Setting, seed: int) -> list[str]:
    """The command line of a run, without what differs between the two sides."""
    settings = {
        "model.path": model,
        "data.train_files": f"[{folder}/data/train.jsonl]",
        "data.val_files": f"[{folder}/data/test.jsonl]",
        "data.train_batch_size": setting.prompts,
        "data.max_response_length": MOST_TOKENS,
        "reward.fn": f"{Path(__file__).parent / 'reward.py'}:score",
        "algorithm.rollout_correction.level": "token",
        "trainer.total_training_steps": setting.steps,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.check_export": "false",
        "trainer.seed": seed,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": folder / "runs",
        "trainer.experiment_name": name,
    }
    return ["train", "recipe=quickstart_grpo", *_words(settings)]


@contextmanager
def servers_of(engine: str, model: Path, setting: Setting, folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Two servers that sleep: words for the run's command line, and its environment."""
    token = secrets.token_hex(16)

    def command(launch: EngineLaunch, place: Path) -> ServerCommand:
        made = ENGINES[engine](launch, place)
        if engine == "hf":
            return replace(made, argv=[*made.argv, "--decode-sleep-ms", str(setting.sleep_ms)])
        return replace(made, environment=installed(made.environment, place / "sleep", setting.sleep_ms))

    launch = EngineLaunch(engine, str(model), dtype="float32", device="cpu", max_running_requests=512, random_seed=0)
    folder.mkdir()
    with Servers([launch] * 2, token, folder, machines=[ThisMachine(command)] * 2) as servers:
        servers.start()
        yield [f"rollout.engine={engine}", f"rollout.urls=[{','.join(servers.urls)}]"], {SERVER_VARIABLE: token}


def run_side(
    engine: str, side: Sequence[str], model: Path, folder: Path, name: str, setting: Setting, seed: int
) -> dict[str, Any]:
    """One training run, and what its files say."""
    with servers_of(engine, model, setting, folder / f"servers_{name}") as (words, environment):
        words = [*train_words(model, folder, name, setting, seed), *side, *words]
        _megarl(words, folder / f"{name}.log", environment, RUN_S)
    return read_run(folder / "runs" / name, setting)


def read_run(run: Path, setting: Setting) -> dict[str, Any]:
    """Times, accuracy and visits of a finished run."""
    rows = [row for row in read_lines(run / "metrics.jsonl") if "timing_s/step" in row]
    if len(rows) != setting.steps:
        raise ValueError(f"{run}: {len(rows)} steps, expected {setting.steps}")
    summary, later = json.loads((run / "summary.json").read_text()), rows[setting.warmup :]
    seconds = later[-1]["time"] - rows[setting.warmup - 1]["time"]
    trained = Counter(visit for line in read_lines(run / "visits.jsonl") for visit in line["trained"])

    def mean(name: str) -> float:
        return fmean(row.get(name, 0.0) for row in later)

    def accuracy(when: str) -> float:
        """Rewards are 0 or 1, but where all are 0 a summary names their mean a score."""
        name = "accuracy" if f"accuracy_{when}" in summary else "score"
        return float(summary[f"{name}_{when}"])

    return {
        "seconds": seconds,
        "step": seconds / len(later),
        "trainer idle": mean("rollout/idle_share"),
        "token age mean": mean("off_policy/token_age/mean"),
        "mean length": mean("response_length/mean"),
        "longest": max(row["response_length/max"] for row in later),
        "accuracy before": accuracy("before"),
        "accuracy after": accuracy("after"),
        "lost": sum(row.get("rollout/lost", 0.0) for row in rows),
        "doubled": sum(count - 1 for count in trained.values()),
    }


def rows(
    engine: str, setting: Setting, folder: Path, say: Callable[[str], object] = lambda line: None
) -> list[dict[str, Any]]:
    """Rounds in which both sides run once, and begin in turns."""
    model, out = prepare(folder, setting), []
    say("the cold start is done")
    for number in range(setting.rounds):
        for side in (SYNC, ASYNC) if number % 2 == 0 else (ASYNC, SYNC):
            name = f"{'ahead' if side is ASYNC else 'on_policy'}_{number}"
            found = run_side(engine, side, model, folder, name, setting, seed=number + 1)
            out.append({"kind": f"learning, {engine}", "rule": " ".join(side), "round": number + 1, **found})
            say(f"{engine}, {name}: {found['step']:.2f} s a step, accuracy {found['accuracy after']:.3f}")
    return out


def ratios(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """ahead beside on-policy: the median ratio of times of a round, and the difference of mean accuracies."""
    sides = [[row for row in found if row["rule"] == " ".join(side)] for side in (SYNC, ASYNC)]
    sync, ahead = (sorted(side, key=lambda row: row["round"]) for side in sides)
    accuracies = [fmean(row["accuracy after"] for row in side) for side in (ahead, sync)]
    return {
        "wall_ratio": median(b["seconds"] / a["seconds"] for a, b in zip(sync, ahead, strict=True)),
        "accuracy_difference": accuracies[0] - accuracies[1],
    }


def _words(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def _megarl(words: Sequence[str], log: Path, environment: dict[str, str], limit_s: float) -> None:
    execute([sys.executable, "-m", "megarl", *words], log, {"PYTHONPATH": str(ROOT), **environment}, limit_s)
