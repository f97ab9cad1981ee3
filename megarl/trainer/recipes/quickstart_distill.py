"""Prepares recipes quickstart_distill and quickstart_two_teachers: the policy, and one or two teachers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from megarl.config import Config
from megarl.data.examples.tasks import join, write_reversals, write_task
from megarl.io.terminal import sentences
from megarl.trainer.build import read_prompts
from megarl.trainer.collectors import make_rewards
from megarl.trainer.evaluation.transformers_score import Task, TransformersScore
from megarl.trainer.recipes import quickstart
from megarl.trainer.recipes.cold_start import cold_start

TEACHER = replace(quickstart.MODEL, layers=4)
CARELESS = quickstart.TASK.careless
# The same problems as those of the policy's own cold start, with right answers.
RIGHT = replace(quickstart.TASK, careless=0.0)
TASKS: dict[str, Callable[[Path], object]] = {
    "sums": partial(write_task, sums=RIGHT),
    "reversals": partial(write_reversals, demonstrations=2),
}


def prepare(config: Config) -> None:
    """Make the files of `data.*` and the folders of the policy and of its teachers, those that are missing.

    Then print what each teacher knows, with which the run's own `val/score` compares.
    """
    if not _is_there(config.model.path):
        make = quickstart.prepare if len(config.teachers) == 1 else _prepare_two
        make(config)
    for name, keys in config.teachers.items():
        if not _is_there(keys.model.path):
            words = [
                "recipe=quickstart_teacher_sft",
                *(() if name == "sums" else _paths(f"quickstart_teacher_sft_{name}")),
            ]
            cold_start(config, words, write_data=TASKS[name], model=TEACHER, role=f"teachers.{name}")
        sentences().print(f"teachers.{name}: val/score {score(config, name):.3f} on what it teaches")


def score(config: Config, name: str) -> float:
    """The mean greedy reward of a teacher on the run's held-out prompts of its own data sources."""
    keys, data = config.teachers[name], config.data
    prompts = read_prompts(config, data.val_files).all(data.val_max_samples)
    own = [prompt for prompt in prompts if not keys.data_sources or prompt.data_source in keys.data_sources]
    task = Task(keys.model.path, own, make_rewards(config, 1), config.rollout.val_kwargs.max_response_length)
    log = config.trainer.run_dir / "logs" / f"score_of_{name}.log"
    return TransformersScore(task, log, silence_s=config.trainer.call_timeout_s).wait()


def _prepare_two(config: Config) -> None:
    """A policy that was shown mistakes in both tasks."""
    words = ["recipe=quickstart_sft", *_paths("quickstart_two_sft", data="quickstart_two_data")]
    cold_start(config, words, write_data=_write_both, model=quickstart.MODEL)


def _write_both(folder: Path) -> None:
    sums, reversals = folder / "sums", folder / "reversals"
    write_task(sums, quickstart.TASK)
    write_reversals(reversals, careless=CARELESS, demonstrations=2)
    join(folder, [sums, reversals])


def _paths(name: str, data: str | None = None) -> list[str]:
    """Words for a training of this name, with files and an initial model of its own."""
    folder = f"runs/{data or f'{name}_data'}"
    return [
        f"trainer.experiment_name={name}",
        f"sft.train_files=[{folder}/sft.jsonl]",
        f"model.path={folder}/initial_model",
    ]


def _is_there(path: str) -> bool:
    return (Path(path) / "config.json").exists()
