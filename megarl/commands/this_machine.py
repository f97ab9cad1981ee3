"""Which machine of a run this is, which of the run's files are missing on it, and which engine it uses.

Its number and the first machine's address come from variables of Slurm or Kubernetes, which are read only if
trainer.nnodes > 1, and only for settings that still have their defaults.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from megarl.config import Config, used_roles
from megarl.config.schema import Trainer
from megarl.config.validate.models import missing_folders
from megarl.data.readers import missing

OVER_NODES = ("train", "sft", "evaluate", "node")  # on all machines but the first, these run `node`
WITH_SERVERS = ("train", "evaluate", "serve")
NODE_ADDRESS = "MEGARL_NODE_ADDR"  # the address to use of this machine, if it has several
# variables with the number of this machine in the job
_RANKS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_COUNTS = ("SLURM_STEP_NUM_NODES", "SLURM_NTASKS_PER_NODE")  # that have to fit the settings


def placed(config: Config, environment: Mapping[str, str]) -> Config:
    """The same run with trainer.node_rank and trainer.master_addr from the environment, if they have their defaults.

    Raises ValueError if the environment has another number of machines than the settings, or is torchrun's.
    """
    trainer, unset = config.trainer, Trainer()
    _refuse_torchrun(environment)
    if trainer.nnodes == 1:
        return config
    _check(trainer, environment)
    node = next((int(environment[name]) for name in _RANKS if environment.get(name, "").isdigit()), trainer.node_rank)
    node = trainer.node_rank if trainer.node_rank != unset.node_rank else node
    address = trainer.master_addr if trainer.master_addr != unset.master_addr else _first_machine(environment)
    if node >= trainer.num_machines:
        raise ValueError(f"{_given(trainer)}: this is machine {node}, counted from 0; expected more")
    here = replace(trainer, node_rank=node, master_addr=address or trainer.master_addr)
    return replace(config, trainer=here)


def described_place(config: Config, environment: Mapping[str, str]) -> tuple[str, str]:
    """Which machine of how many this is, where the driver is, and which variables say so; what to mend."""
    num, counted = config.trainer.num_machines, environment.get("SLURM_STEP_NUM_NODES", "")
    mend = f"trainer.nnodes={counted}, or one process alone" if counted.isdigit() and int(counted) != num else ""
    seen = {name: environment[name] for name in (*_RANKS, *_NODES, *_COUNTS, "MASTER_ADDR") if environment.get(name)}
    node = next((seen[name] for name in _RANKS if seen.get(name, "").isdigit()), config.trainer.node_rank)
    driver = _first_machine(environment) or config.trainer.master_addr
    variables = ", ".join(f"{name}={value}" for name, value in seen.items()) or "no variable of a scheduler"
    return f"machine {node} of {counted or num}, the driver at {driver} ({variables})", mend


def missing_files(config: Config) -> Iterator[str]:
    """A sentence for each folder of a model and each data file that is not here, of a run on this machine alone.

    A run that makes its files itself (trainer.prepare) lacks none.
    """
    data, trainer = config.data, config.trainer
    if trainer.num_machines == 1 and not trainer.prepare:
        yield from missing_folders(config, tuple(used_roles(config, "train")))
        yield from missing([*data.train_files, *data.val_files])


def choose_engine(command: str, reasons: list[str], config: Config) -> str:
    """The engine for rollout.engine=auto; `reasons` gets the reason.  It stays auto where no server is started."""
    if command not in WITH_SERVERS:
        return config.rollout.engine
    if command in OVER_NODES and placed(config, os.environ).trainer.node_rank:  # the first machine decides
        return config.rollout.engine
    from megarl.trainer.servers.make_servers import chosen_engine  # with torch, which help does not need

    engine, reason = chosen_engine(config, command)
    if config.trainer.check_only and config.trainer.device != "cpu" and engine == "hf":
        reasons.append(
            f"rollout.engine=auto: checked as sglang, as on GPUs; on this machine it is hf, because {reason}"
        )
        return config.rollout.engine
    reasons.append(f"rollout.engine=auto: {engine}, because {reason}")
    return engine


def _check(trainer: Trainer, environment: Mapping[str, str]) -> None:
    """Raises ValueError unless Slurm runs one process on each machine of the run."""
    given = environment.get("SLURM_STEP_NUM_NODES", "")
    if given.isdigit() and int(given) != trainer.num_machines:
        raise ValueError(f"{_given(trainer)}: this srun has {given} (SLURM_STEP_NUM_NODES); expected the same number")
    given = environment.get("SLURM_NTASKS_PER_NODE", "")
    if given.isdigit() and int(given) != 1:
        raise ValueError(f"srun --ntasks-per-node={given}: expected 1, megarl starts the ranks of a machine itself")


def _given(trainer: Trainer) -> str:
    spare = f" trainer.spare_nodes={trainer.spare_nodes}" if trainer.spare_nodes else ""
    return f"trainer.nnodes={trainer.nnodes}{spare}"


def _refuse_torchrun(environment: Mapping[str, str]) -> None:
    if "TORCHELASTIC_RUN_ID" in environment:
        raise ValueError(
            "torchrun: expected `megarl train` itself on each machine, as launch/node.sh starts it, since torchrun "
            "listens on all interfaces and executes what anyone sends there"
        )


def _first_machine(environment: Mapping[str, str]) -> str | None:
    nodes = next((environment[name] for name in _NODES if environment.get(name)), None)
    return environment.get("MASTER_ADDR") if nodes is None else first_host(nodes)


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list.  Example: first_host("gpu[007-012,40]-ib,login1") -> "gpu007-ib"."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^\[,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes
