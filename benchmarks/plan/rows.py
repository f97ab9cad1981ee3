"""Published rows (published.yaml) as jobs of the planner, what it predicts for each, and the halves they are in."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megarl.arch.gpus import find
from megarl.arch.layout import Layout
from megarl.config import config_dir
from megarl.plan.constants import CONSTANTS, Constants
from megarl.plan.job import Job, Role
from megarl.plan.memory import of_stage_bytes
from megarl.plan.predict import stage_times, step_time
from megarl.plan.serving import rollout
from megarl.plan.training import scoring, training
from megarl.plan.transfers import push

FILE = Path(__file__).parents[1] / "published.yaml"
SEED = 6  # chosen before the first fit; which rows it takes is a test
FITTED, HELD_OUT, NEITHER = "fitted", "held out", "neither"
KINDS = ("step", "training", "rollout", "push", "memory")
NEAR = 1.5  # factor within which a prediction counts as right


@dataclass(frozen=True)
class Row:
    """One published number."""

    name: str
    run: str  # rows of a run are not independent
    kind: str
    source: str
    quantity: str
    published: float
    spread: tuple[float, float]  # the lowest and the highest that the source says
    job: Job
    balanced: bool  # experts got equally many tokens by force
    assumed: tuple[str, ...]
    stages: dict[str, float] = field(default_factory=dict)  # quantity -> published value, of parts of the step

    def predicted(self, constants: Constants = CONSTANTS, quantity: str | None = None) -> float:
        """The row's own quantity, or another one of the same job."""
        if self.balanced:
            constants = replace(constants, expert_imbalance=1.0)
        return QUANTITIES[quantity or self.quantity](replace(self.job, constants=constants))

    def error(self, constants: Constants = CONSTANTS) -> float:
        """Logarithm of predicted over published."""
        return math.log(self.predicted(constants) / self.published)

    def parts(self, constants: Constants = CONSTANTS) -> dict[str, float]:
        """Predicted seconds of each stage of a step; empty for what is no step."""
        if self.kind != "step":
            return {}
        job = replace(self.job, constants=constants)
        return stage_times(job, training(job), rollout(job))

    def stage_errors(self, constants: Constants = CONSTANTS) -> dict[str, float]:
        """The same of the parts that the sources measured."""
        return {name: math.log(self.predicted(constants, name) / value) for name, value in self.stages.items()}

    def is_near(self, constants: Constants = CONSTANTS) -> bool:
        """Whether the sum and each published part are within the factor: errors of parts may not cancel."""
        errors = [self.error(constants), *self.stage_errors(constants).values()]
        return all(abs(error) < math.log(NEAR) for error in errors)


def load(path: Path = FILE) -> tuple[list[Row], list[dict[str, str]]]:
    """All rows, and what could not be predicted with the reason."""
    said = _read(path)
    return [_row(entry, said["sources"]) for entry in said["rows"]], said["unpredicted"]


def halves(rows: Iterable[Row], seed: int = SEED) -> dict[str, str]:
    """Name of a row -> its half.  Of each kind half of the runs is fitted; on memory nothing is."""
    rows = list(rows)
    timed = sorted((row for row in rows if row.kind != "memory"), key=lambda row: -KINDS.index(row.kind))
    runs = {row.run: row.kind for row in timed}  # of a run with several kinds the first of KINDS
    draw, fitted = random.Random(seed), set()
    for kind in KINDS:
        alike = sorted(run for run, own in runs.items() if own == kind)
        fitted.update(draw.sample(alike, (len(alike) + 1) // 2))
    return {row.name: NEITHER if row.kind == "memory" else FITTED if row.run in fitted else HELD_OUT for row in rows}


def _row(entry: dict[str, Any], sources: dict[str, str]) -> Row:
    (quantity, said), name = entry["published"].copy().popitem(), entry["name"]
    lowest, highest = said if isinstance(said, list) else (said, said)
    return Row(
        name=name,
        run=entry.get("run", name),
        kind=entry["kind"],
        source=sources[entry["source"]],
        quantity=quantity,
        published=math.sqrt(lowest * highest),
        spread=(lowest, highest),
        job=_job(entry),
        balanced=entry.get("balanced", False),
        assumed=tuple(_flat(entry.get("assumed", []))),
        stages=entry.get("stages", {}),
    )


def _job(entry: dict[str, Any]) -> Job:
    said = dict(entry["job"])
    layout = Layout(**said.pop("layout", {}), use_distributed_optimizer=True)
    layout = replace(layout, sequence_parallel=layout.tp > 1)
    hf = entry["hf"] if "hf" in entry else preset_config(entry["model"])
    actor = Role("actor", hf, layout, said.pop("num_ranks"), overlap_grad_reduce=True)
    actor = replace(actor, **{name: said.pop(name) for name in Role.__dataclass_fields__.keys() & said.keys()})
    if said.get("shared", True):
        said.setdefault("push", "gathered")  # no other framework sends slices to servers on the trainer's GPUs
    job = Job(find(entry["gpu"]), actor, **said)
    if not entry.get("actor_and_ref"):
        return job
    return replace(job, reference=replace(job.actor, name="ref", optimizer=None, param_offload=True))


@cache
def preset_config(preset: str) -> dict[str, Any]:
    """The config.json of a preset."""
    return _read(config_dir() / "model" / f"{preset}.yaml")["model"]["config"]


def _read(path: Path) -> dict[str, Any]:
    """With libyaml where there is one, which takes a tenth of the time."""
    return yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _flat(said: Any) -> Iterator[str]:
    for each in said:
        yield from [each] if isinstance(each, str) else _flat(each)


def _forward_s(job: Job) -> float:
    """The actor's log-probs, and the reference's."""
    return scoring(job) + (scoring(job, job.reference) if job.reference else 0.0)


def _peak_gib(job: Job) -> float:
    """Of the fullest stage while the actor learns, without what the rule keeps free."""
    actor = job.actor
    rooms = [of_stage_bytes(actor, stage) for stage in range(actor.layout.pp)]
    return max(
        room.total - room.reserve - (room.optimizer if actor.optimizer_offload else 0) for room in rooms
    ) / 2**30  # fmt: skip


QUANTITIES = {
    "step_s": step_time,
    "train_s": lambda job: training(job).seconds,
    "forward_s": _forward_s,
    "gen_s": lambda job: rollout(job).seconds,
    "push_s": push,
    "tokens_per_s_per_gpu": lambda job: job.tokens / training(job).seconds / job.actor.num_ranks,
    "mfu": lambda job: training(job).mfu,
    "peak_gib": _peak_gib,
}
