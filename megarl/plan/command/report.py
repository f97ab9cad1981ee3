"""`trainer.check_only`: prints the layout of every role and the memory of each kind of rank; needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.config import Config, layout_of, model_config, used_roles
from megarl.config.validate.models import group_of, model_of
from megarl.layout import Layout
from megarl.plan.command.show import LOCAL, memory_table, plain_table
from megarl.plan.from_config import job_of, numbers_of_model
from megarl.plan.gpus import GPUS
from megarl.plan.job import Job
from megarl.plan.memory.count import of_stage, whole
from megarl.plan.memory.gpu_budget import GpuBudget, gpu_budgets_of_trainer, local_totals
from megarl.plan.memory.memory import RESERVE_BYTES, SERVER_BYTES
from megarl.terminal import sentences

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")


@dataclass(frozen=True)
class Stages:
    """Consecutive pipeline stages whose ranks have equal numbers of layers and parameters."""

    first: int
    last: int
    layers: int
    parameters: int

    @property
    def name(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True)
class Seat:
    """A role with its layout and its ranks."""

    role: str
    layout: Layout
    first_rank: int
    num_ranks: int
    parameters: int  # of the whole model; a critic has a value head instead of the vocabulary head
    stages: tuple[Stages, ...]


def report(config: Config, console: Console | None = None, command: str = "train") -> None:
    """Print the report for the roles of `megarl COMMAND`; of a model that is not here yet it is a line."""
    console, roles = console or sentences(), used_roles(config, command)
    if role := next((role for role in roles if not model_config(config, role)), None):
        where = f"{group_of(role)}.path={model_of(config, role).path}"
        line = f"{where}: its config.json is not on this machine; layout and memory were not planned"
        console.print(f"{line} (model=PRESET has the sizes of known models)", markup=False, highlight=False)
        return
    seats, job = seats_of(config, command), job_of(config, GPUS["h100"], command=command)
    console.print(_layouts(seats))
    console.print("\na rank of each kind")
    console.print(_ranks(seats))
    budgets = {} if config.trainer.device == "cpu" else _memory(job, console)
    console.print()
    for line in (*_sizes(seats), *_gpus(budgets), *(_servers(config) if job.num_servers else ())):
        console.print(line, markup=False, highlight=False)


def _memory(job: Job, console: Console) -> Mapping[str, GpuBudget]:
    """Print and return what each kind of rank takes of a GPU, which is the same on every type of GPU."""
    budgets, local = gpu_budgets_of_trainer(job), local_totals(job)
    reserve = f"{RESERVE_BYTES / 1e9:.0f} GB are spare"
    console.print(f"\nthe GB of GPU memory that it takes at its fullest, where {reserve}", highlight=False)
    console.print(memory_table(budgets, local))
    if local:
        console.print(LOCAL, highlight=False)
    return budgets


def seats_of(config: Config, command: str = "train") -> list[Seat]:
    """Raises: ValueError if the numbers of a role's model are not known yet."""
    return [_seat(config, role) for role in used_roles(config, command)]


def _seat(config: Config, role: str) -> Seat:
    hf, node = numbers_of_model(config, role), config.role(role)
    layout = layout_of(node.megatron)
    return Seat(role, layout, node.first_rank, node.num_ranks, whole(hf, role), _stages(hf, layout, role))


def _stages(hf: Mapping[str, Any], layout: Layout, role: str) -> tuple[Stages, ...]:
    layers = layout.stage_layers(hf["num_hidden_layers"])
    counted = [(layers[stage], of_stage(hf, layout, stage, role)) for stage in range(layout.pp)]
    out, first = [], 0
    for (each, parameters), alike in groupby(counted):
        last = first + len(list(alike)) - 1
        out.append(Stages(first, last, each, parameters.total))
        first = last + 1
    return tuple(out)


def _layouts(seats: list[Seat]) -> Table:
    table = plain_table("role", *SIZES, "ranks", "parameters of the model")
    for seat in seats:
        layout = seat.layout
        sizes = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.expert_tp)
        ranks = f"{seat.first_rank}-{seat.first_rank + seat.num_ranks - 1}"
        copies = seat.num_ranks // layout.model_size
        table.add_row(seat.role, *map(str, sizes), str(copies), ranks, f"{seat.parameters:,}")
    return table


def _ranks(seats: list[Seat]) -> Table:
    table = plain_table("role", "stage", "layers", "parameters")
    for seat in seats:
        for at, stages in enumerate(seat.stages):
            role = seat.role if at == 0 else ""
            table.add_row(role, stages.name, str(stages.layers), f"{stages.parameters:,}")
    return table


def _sizes(seats: list[Seat]) -> Iterator[str]:
    every = [(seat, stages) for seat in seats for stages in seat.stages]
    for word, choose in (("smallest", min), ("largest", max)):
        seat, stages = choose(every, key=lambda pair: pair[1].parameters)
        yield f"{word} rank: {seat.role}, stage {stages.name}, {stages.parameters:,} parameters"


def _gpus(budgets: Mapping[str, GpuBudget]) -> Iterator[str]:
    if budgets:
        kind = max(budgets, key=lambda name: budgets[name]["total"])
        memory = budgets[kind]["total"] / 1e9
        where = "see megarl/plan/memory/memory.py; `megarl plan` has the time"
        yield f"a GPU needs about {memory:.0f} GB ({kind}; {where})"


def _servers(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.urls:
        yield f"servers: {len(rollout.urls)} that run already"
    elif rollout.engine != "hf":  # auto: with GPUs it is sglang
        where = "the trainer's, in turns" if rollout.placement == "shared" else "of their own"
        yield f"servers: {rollout.num_servers} of {rollout.tensor_model_parallel_size} GPUs each, {where}"
        if rollout.memory_fraction is not None:
            beside = SERVER_BYTES + (RESERVE_BYTES if rollout.placement == "shared" else 0)
            share = f"{rollout.memory_fraction:.0%} of each GPU for weights and cache"
            yield f"a server takes {share}, and {beside / 1e9:.0f} GB"
    else:
        yield f"servers: {rollout.num_servers}, rollout.engine=hf"
