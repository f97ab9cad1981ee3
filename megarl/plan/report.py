"""The report of a checked run, as `trainer.check_only` prints it: the layout of every role, the memory of each rank.

`megarl plan` (commands/plan) prints its tables with the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from megarl.arch.gpus import GPUS
from megarl.arch.model_types import needs_newer
from megarl.config import Config, model_config, used_roles
from megarl.config.validate.models import group_of, model_of
from megarl.io.terminal import sentences
from megarl.plan.from_config import job_of, role_of
from megarl.plan.gpu_budget import GpuBudget, equal_stages, gpu_budgets_of_trainer, local_totals
from megarl.plan.job import Job, Role
from megarl.plan.memory import RESERVE_BYTES, SERVER_BYTES
from megarl.weights.count import check, whole

# table column -> the parts of a rank's memory that it shows
COLUMNS = {
    "weights": ("weights", "adapters"),
    "grads": ("gradients",),
    "optim": ("optimizer",),
    "activ": ("activations",),
    "whole": ("gathered",),
    "chunk": ("log_prob_chunk",),
    "cache": ("kv_cache", "states"),
    "push": ("server_weights", "push_bucket"),
    "others": ("others", "save_copies", "routes", "server_routes", "support", "taught", "teacher_heads"),
    "spare": ("reserve",),
    "GB": ("total",),
}
HOST = "host: host memory of a machine, for what roles offload and (others) checkpoints, replays and teachers"
LOCAL = "local: GB with local layers, where Transformer-Engine is not installed"
AXES = ("tp", "pp", "vpp", "cp", "ep", "etp")


def report(config: Config, console: Console | None = None, command: str = "train") -> None:
    """Print the report for the roles of `megarl COMMAND`; of a model that is not here yet it is a line."""
    console, names = console or sentences(), used_roles(config, command)
    if name := next((name for name in names if not model_config(config, name)), None):
        where = f"{group_of(name)}.path={model_of(config, name).path}"
        line = f"{where}: its config.json is not on this machine; layout and memory were not planned"
        print_line(console, f"{line} (model=PRESET has the sizes of known models)")
        return
    for name in names:
        try:
            check(model_config(config, name))
        except ValueError as error:
            print_line(console, f"{error}; layout and memory were not planned")
            return
    for kind in sorted({str(model_config(config, name)["model_type"]) for name in names}):
        if newer := needs_newer(kind):
            print_line(console, f"warning: training it: {newer}")
    roles = [role_of(config, name) for name in names]
    job = job_of(config, GPUS["h100"], command=command)
    console.print(_layouts(roles))
    console.print("\na rank of each kind")
    console.print(_ranks(roles))
    budgets = {} if config.trainer.device == "cpu" else _memory(job, console)
    console.print()
    for line in (*_sizes_of(roles), *_gpus(budgets), *(_servers(config) if job.num_servers else ())):
        print_line(console, line)


def _memory(job: Job, console: Console) -> Mapping[str, GpuBudget]:
    """Print and return what each kind of rank takes of a GPU, which is the same on every type of GPU."""
    budgets, local = gpu_budgets_of_trainer(job), local_totals(job)
    reserve = f"{RESERVE_BYTES / 1e9:.0f} GB are spare"
    print_line(console, f"\nthe GB of GPU memory that it takes at its fullest, where {reserve}")
    console.print(memory_table(budgets, local))
    if local:
        print_line(console, LOCAL)
    return budgets


def _layouts(roles: Sequence[Role]) -> Table:
    table = plain_table("role", *AXES, "dp", "ranks", "parameters of the model")
    for role in roles:
        layout = role.layout
        sizes = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.expert_tp)
        ranks = f"{role.first_rank}-{role.first_rank + role.num_ranks - 1}"
        table.add_row(role.name, *map(str, sizes), str(role.copies), ranks, f"{whole(role.hf, role.name, role.mtp):,}")
    return table


def _ranks(roles: Sequence[Role]) -> Table:
    table = plain_table("role", "stage", "layers", "parameters")
    for role in roles:
        for at, stages in enumerate(equal_stages(role)):
            name = role.name if at == 0 else ""
            table.add_row(name, stages.name, str(stages.layers), f"{stages.parameters:,}")
    return table


def _sizes_of(roles: Sequence[Role]) -> Iterator[str]:
    every = [(role, stages) for role in roles for stages in equal_stages(role)]
    for word, choose in (("smallest", min), ("largest", max)):
        role, stages = choose(every, key=lambda pair: pair[1].parameters)
        yield f"{word} rank: {role.name}, stage {stages.name}, {stages.parameters:,} parameters"


def _gpus(budgets: Mapping[str, GpuBudget]) -> Iterator[str]:
    if budgets:
        kind = max(budgets, key=lambda name: budgets[name]["total"])
        memory = budgets[kind]["total"] / 1e9
        where = "see megarl/plan/memory.py; `megarl plan` has the time"
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


def plain_table(*names: str) -> Table:
    """A table with right-aligned numbers, within 80 columns."""
    table = Table(*names, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for at, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "right" if at else "left"
    return table


def memory_table(budgets: Mapping[str, GpuBudget], local: Mapping[str, int]) -> Table:
    """GB (10^9 bytes) of a rank of each kind; unused columns are left out.  local: totals with local layers."""
    present = {part for budget in budgets.values() for part in budget}
    used = {name: parts for name, parts in COLUMNS.items() if present & set(parts)}
    table = plain_table("rank", *used, *(["local"] if local else []))
    for kind, budget in budgets.items():
        sizes = [sum(budget.get(part, 0) for part in parts) for parts in used.values()]
        sizes += [local.get(kind, budget["total"])] if local else []
        table.add_row(kind, *(f"{size / 1e9:.1f}" if size else "" for size in sizes))
    return table


def print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)
