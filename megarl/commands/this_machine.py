"""Which machine of a run this is, which files and packages of the run it lacks, and which engine it uses.

Its number and the first machine's address come from the variables of places.py, where the settings do not say them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec

from megarl.commands.places import Place, place_in
from megarl.config import Config, names, used_roles
from megarl.config.schema import Trainer
from megarl.config.settings import show
from megarl.config.validate.models import missing_folders
from megarl.data.readers import missing

OVER_NODES = ("train", *names.SUPERVISED, "evaluate", "node")  # on all machines but the first, these run `node`
TRAINS = ("train", *names.SUPERVISED)
WITH_SERVERS = ("train", "evaluate", "serve")
NODE_ADDRESS = "MEGARL_NODE_ADDR"  # the address to use of this machine, if it has several


def placed(config: Config, environment: Mapping[str, str]) -> Config:
    """The same run with trainer.node_rank and trainer.master_addr from the environment, if nobody has given them.

    On the first machine trainer.node_rank stays null: its config.yaml is for all of them.  A number that is given
    counts alone: whoever starts the machines knows them.
    Raises ValueError if the environment has other machines than the settings, tells no number, or is torchrun's.
    """
    trainer = config.trainer
    _refuse_torchrun(environment)
    found = place_in(environment) if trainer.node_rank is None else None
    if found is not None:
        _check(trainer, found)
    elif trainer.node_rank is None and trainer.nnodes > 1:
        srun = ", or `srun --ntasks-per-node=1 megarl ...`" if "SLURM_JOB_ID" in environment else ""
        raise ValueError(
            f"{_given(trainer)}: no variable of a scheduler says which of the machines this is; expected "
            f"trainer.node_rank=0 on the first one, 1 on the next{srun}"
        )
    address = trainer.master_addr
    if trainer.nnodes > 1 and address == Trainer().master_addr:
        address = (found.first if found else environment.get("MASTER_ADDR")) or address
    rank = (found.rank if found else 0) or trainer.node_rank
    return replace(config, trainer=replace(trainer, node_rank=rank, master_addr=address))


def described_place(config: Config, environment: Mapping[str, str]) -> tuple[str, str]:
    """Which machine of how many this is, where the driver is, and which variables say so; what to mend."""
    here, found, mend = config.trainer, None, ""
    try:
        found = place_in(environment)
        here = placed(config, environment).trainer
    except ValueError as error:
        mend = str(error)
    count = found.machines if found and found.machines else here.num_machines
    rank, driver = (found.rank, found.first or here.master_addr) if found else (here.node_rank or 0, here.master_addr)
    return f"machine {rank} of {count}, the driver at {driver} ({found or 'no variable of a scheduler'})", mend


def missing_files(config: Config) -> Iterator[str]:
    """A sentence for each folder of a model and each data file that is not here, of a run on this machine alone.

    A run that makes its files itself (trainer.prepare) lacks none.
    """
    data, trainer = config.data, config.trainer
    if trainer.num_machines == 1 and not trainer.prepare:
        yield from missing_folders(config, tuple(used_roles(config, "train")))
        yield from missing([*data.train_files, *data.val_files])


def missing_packages(config: Config) -> Iterator[str]:
    """A sentence for each tracker of trainer.logger whose packages are not here; its name is that of its extra."""
    for name in config.trainer.logger:
        if lacking := [package for package in names.PACKAGES_OF_LOGGER[name] if find_spec(package) is None]:
            yield (
                f"trainer.logger={show(config.trainer.logger)}: {name} needs {', '.join(lacking)}, not installed here; "
                f"expected `pip install 'megarl[{name}]'`, or no {name} in trainer.logger"
            )


def choose_engine(command: str, reasons: list[str], config: Config) -> str:
    """The engine for rollout.engine=auto; `reasons` gets the reason.  It stays auto where no server is started."""
    if command not in WITH_SERVERS:
        return config.rollout.engine
    is_placed = command in OVER_NODES and not config.trainer.check_only
    if is_placed and placed(config, os.environ).trainer.node_rank:  # the first machine decides
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


def _check(trainer: Trainer, found: Place) -> None:
    """Raises ValueError unless each machine of the run has one process."""
    alone = ", or trainer.node_rank=0 for a run of this machine alone" if trainer.nnodes == 1 else ""
    if found.each > 1:
        raise ValueError(
            f"{found.by['each']}: {found.launcher} starts {found.each} processes on a machine; expected 1, as megarl "
            f"starts the ranks of a machine itself{alone}"
        )
    if found.machines not in (None, trainer.num_machines):
        raise ValueError(
            f"{_given(trainer)}: {found.launcher} has {found.machines} machines ({found.by['machines']}); expected the "
            f"same number{alone}"
        )
    if found.rank >= trainer.num_machines:
        this = f"this is machine {found.rank}, counted from 0 ({found.by['rank']})"
        raise ValueError(f"{_given(trainer)}: {this}; expected more{alone}")


def _given(trainer: Trainer) -> str:
    spare = f" trainer.spare_nodes={trainer.spare_nodes}" if trainer.spare_nodes else ""
    return f"trainer.nnodes={trainer.nnodes}{spare}"


def _refuse_torchrun(environment: Mapping[str, str]) -> None:
    if "TORCHELASTIC_RUN_ID" in environment:
        raise ValueError(
            "torchrun: expected `megarl train` itself on each machine, as launch/node.sh starts it, since torchrun "
            "listens on all interfaces and executes what anyone sends there"
        )
