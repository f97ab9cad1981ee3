"""`trainer.check_only`: how every role lies over the ranks, and what each kind of rank holds.  No GPU is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.config.layouts import used_roles
from megarl.config.models import model_config
from megarl.config.resolve import MICRO_BATCH_KEYS, layout_of
from megarl.config.schema import Config
from megarl.layout import Layout
from megarl.plan.count import of_stage, whole
from megarl.plan.memory import RESERVE_BYTES, Memory, Work, of_stage_bytes

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")


@dataclass(frozen=True)
class Stages:
    """Pipeline stages one after the other whose ranks hold equally much."""

    first: int
    last: int
    layers: int
    parameters: int
    memory: Memory  # of the stage among them that needs most

    @property
    def name(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True)
class Seat:
    """One role: its place, and its ranks."""

    role: str
    layout: Layout
    first_rank: int
    num_ranks: int
    parameters: int  # of the whole model, a critic's value head in place of its vocabulary head
    stages: tuple[Stages, ...]


def report(config: Config, console: Console | None = None) -> None:
    """Print it for the roles of `megarl train`."""
    console = console or Console(soft_wrap=True)
    seats = seats_of(config)
    console.print(_layouts(seats))
    reserve = f"{RESERVE_BYTES / 1e9:.0f} GB are kept free"
    console.print(f"\na rank of each kind, and the GB of GPU memory it takes ({reserve})", highlight=False)
    console.print(_ranks(seats))
    console.print()
    for line in _lines(config, seats):
        console.print(line, markup=False, highlight=False)


def seats_of(config: Config) -> list[Seat]:
    """ValueError where the numbers of a role's model are not known yet."""
    return [_seat(config, role) for role in used_roles(config, "train")]


def _seat(config: Config, role: str) -> Seat:
    hf = model_config(config, role)
    if not hf:
        path = config.model.path if role == "actor" else getattr(config, role).model.path
        raise ValueError(f"model.path={path}: its config.json is not here; want a folder that has one, or model=PRESET")
    node = getattr(config, role)
    layout = layout_of(node.megatron)
    return Seat(
        role, layout, node.first_rank, node.num_ranks, whole(hf, role), _stages(hf, layout, _work(config, role), role)
    )


def _work(config: Config, role: str) -> Work:
    node, keys = getattr(config, role), MICRO_BATCH_KEYS[role]
    longest = config.data.max_prompt_length + config.data.max_response_length
    sequences = getattr(node, keys.per_rank)
    return Work(
        num_ranks=node.num_ranks,
        max_tokens=getattr(node, keys.tokens) if sequences is None else sequences * longest,
        recompute=node.megatron.recompute_method == "uniform",
        dtype=config.model.dtype,
        optimizer=None if role == "ref" else node.optim.name,
        fsdp=node.strategy == "fsdp",
    )


def _stages(hf: Mapping[str, Any], layout: Layout, work: Work, role: str) -> tuple[Stages, ...]:
    layers = layout.stage_layers(hf["num_hidden_layers"])
    counted = [(layers[stage], of_stage(hf, layout, stage, role)) for stage in range(layout.pp)]
    out, first = [], 0
    for (each, parameters), alike in groupby(counted):
        last = first + len(list(alike)) - 1
        memory = max(
            (of_stage_bytes(hf, layout, stage, work, role) for stage in range(first, last + 1)), key=lambda m: m.total
        )
        out.append(Stages(first, last, each, parameters.total, memory))
        first = last + 1
    return tuple(out)


def _table(*names: str) -> Table:
    """Numbers to the right, and all of it within 80 columns."""
    table = Table(*names, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for at, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "right" if at else "left"
    return table


def _layouts(seats: list[Seat]) -> Table:
    table = _table("role", *SIZES, "ranks", "parameters of the model")
    for seat in seats:
        layout = seat.layout
        sizes = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.expert_tp)
        ranks = f"{seat.first_rank}-{seat.first_rank + seat.num_ranks - 1}"
        copies = seat.num_ranks // layout.model_size
        table.add_row(seat.role, *map(str, sizes), str(copies), ranks, f"{seat.parameters:,}")
    return table


def _ranks(seats: list[Seat]) -> Table:
    """Of one rank of each kind; GB are 10^9 bytes, as GPUs are named."""
    held = ("weights", "gradients", "optimizer", "activations", "GB")
    table = _table("role", "stage", "layers", "parameters", *held)
    for seat in seats:
        for at, stages in enumerate(seat.stages):
            role, memory = seat.role if at == 0 else "", stages.memory
            sizes = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.total)
            numbers = (f"{size / 1e9:.1f}" for size in sizes)
            table.add_row(role, stages.name, str(stages.layers), f"{stages.parameters:,}", *numbers)
    return table


def _lines(config: Config, seats: list[Seat]) -> Iterator[str]:
    every = [(seat, stages) for seat in seats for stages in seat.stages]
    for word, choose in (("smallest", min), ("largest", max)):
        seat, stages = choose(every, key=lambda pair: pair[1].parameters)
        yield f"{word} rank: {seat.role}, stage {stages.name}, {stages.parameters:,} parameters"
    memory = max(stages.memory.total for _, stages in every)
    yield (
        f"a GPU needs about {memory / 1e9:.0f} GB while one role works (megarl/plan/memory.py has the rule); roles "
        "without param_offload and optimizer_offload add up"
    )
    rollout = config.rollout
    if rollout.urls:
        yield f"servers: {len(rollout.urls)} that run already"
    elif rollout.engine == "sglang":
        where = "the trainer's, in turns" if rollout.placement == "shared" else "of their own"
        yield f"servers: {rollout.num_servers} of {rollout.tensor_model_parallel_size} GPUs each, {where}"
    else:
        yield f"servers: {rollout.num_servers}, rollout.engine={rollout.engine}"
