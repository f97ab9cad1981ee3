"""Which machine of a run this is: its number and the first machine's address, from Slurm's or Kubernetes' variables.

They are read only if trainer.nnodes > 1, and only for settings that still have their defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from megarl.config import Config
from megarl.config.schema import Trainer

NODE_ADDRESS = "MEGARL_NODE_ADDR"  # the address to use of this machine, if it has several
# variables with the number of this machine in the job
_RANKS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")


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
    found = replace(trainer, node_rank=node, master_addr=address or trainer.master_addr)
    return replace(config, trainer=found)


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
    found = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^\[,]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes
