"""Which machine of a job this process is, by the environment variables of schedulers and launchers.

LAUNCHERS is all that is known of them: the innermost first, as mpirun and srun start processes inside of other jobs,
and last the names that people set by hand.  The first that tells a number counts.  Variables of an allocation, which
all of its processes have, tell none: a batch script without srun is one process, not machine 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple


class Launcher(NamedTuple):
    """Names of variables, of which the first that is set counts; `*` stands for any text."""

    name: str
    rank: tuple[str, ...]  # the number of this machine; of several at most one is above 0
    machines: tuple[str, ...] = ()  # how many there are; where names are given, one has to be set
    hosts: tuple[str, ...] = ("MASTER_ADDR",)  # the machines' names, or the first one's address
    each: tuple[str, ...] = ()  # processes of each machine, as 2 or as Slurm's 2(x3),1


_SLURM_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_NODE_FILE = "PBS_NODEFILE"  # a file with a name in each line
_MPI_HOSTS = ("MASTER_ADDR", *_SLURM_HOSTS, _NODE_FILE)  # MPI itself tells none
LAUNCHERS = (
    Launcher(
        "mpirun", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), _MPI_HOSTS, ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    ),
    # In a heterogeneous job these count over all components that the step has.
    Launcher("srun", ("SLURM_NODEID",), ("SLURM_STEP_NUM_NODES",), _SLURM_HOSTS, ("SLURM_STEP_TASKS_PER_NODE",)),
    Launcher("SkyPilot", ("SKYPILOT_NODE_RANK",), ("SKYPILOT_NUM_NODES",), ("SKYPILOT_NODE_IPS",)),
    # TrainJob and PyTorchJob, where WORLD_SIZE may count ranks.
    Launcher("Kubeflow", ("PET_NODE_RANK",), ("PET_NNODES",), ("PET_MASTER_ADDR", "MASTER_ADDR")),
    # Each task of a Volcano job has its names (VC_WORKER_NUM).  Where it has several tasks, RANK counts.
    Launcher("Volcano", ("VC_TASK_INDEX",), ("VC_*_NUM",), ("VC_*_HOSTS",)),
    # JOB_INDEX: the annotation jobset.sigs.k8s.io/job-index, which the owner of a JobSet of many Jobs puts there.
    Launcher("a Kubernetes Job", ("JOB_INDEX", "JOB_COMPLETION_INDEX")),
    Launcher("mpiexec", ("PMI_RANK",), ("PMI_SIZE",), _MPI_HOSTS, ("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS")),
    Launcher("PBS", ("PBS_NODENUM",), (), (_NODE_FILE,)),
    Launcher("the environment", ("RANK",), ("WORLD_SIZE",), ("MASTER_ADDR",), ("LOCAL_WORLD_SIZE",)),
)


class Place(NamedTuple):
    """What a launcher says of this process; None: it does not say that."""

    launcher: str
    rank: int
    machines: int | None
    first: str | None  # name or address of the first machine
    each: int  # processes of a machine
    by: dict[str, str]  # "rank", "machines", "first", "each" -> the variable, as in SLURM_NODEID=1

    def __str__(self) -> str:
        return ", ".join(self.by.values())


def place_in(environment: Mapping[str, str]) -> Place | None:
    """None where nothing tells a number.  Raises ValueError where the variables of a launcher do not tell one."""
    for launcher in LAUNCHERS:
        ranks, counts, hosts, each = (_set_in(environment, names) for names in launcher[1:])
        if not ranks or (launcher.machines and not counts):
            continue
        known = {"rank": ranks, "machines": counts[:1], "first": hosts[:1], "each": each[:1]}
        by = {what: ", ".join(map(_shown, some)) for what, some in known.items() if some}
        numbers = {_number(variable) for variable in ranks}
        if len(numbers - {0}) > 1:
            raise ValueError(f"{by['rank']}: two numbers of this machine; expected one above 0, or trainer.node_rank")
        return Place(
            launcher.name,
            max(numbers),
            _number(counts[0]) if counts else None,
            _first_of(hosts[0]) if hosts else None,
            max([1, *(int(n) for variable in each[:1] for n in re.findall(r"(?:^|,)(\d+)", variable.value))]),
            by,
        )
    return None


def first_host(nodes: str) -> str:
    """The first name of a list, Slurm's or others'.  Example: first_host("gpu[007-012,40]-ib,login") -> "gpu007-ib"."""
    match = re.match(r"([^\[,\s]*)(?:\[([^\],-]*)[^\]]*\]([^\[,\s]*))?", nodes.strip())
    return "".join(part or "" for part in match.groups()) if match else nodes


class _Variable(NamedTuple):
    name: str
    value: str


def _set_in(environment: Mapping[str, str], names: Sequence[str]) -> list[_Variable]:
    """Those of these names that are set, in their order; none where several fit a pattern, or whose file is missing."""
    found = [[name for name in sorted(environment) if fnmatchcase(name, pattern)] for pattern in names]
    known = [_Variable(some[0], environment[some[0]]) for some in found if len(some) == 1 and environment[some[0]]]
    return [variable for variable in known if variable.name != _NODE_FILE or Path(variable.value).is_file()]


def _shown(variable: _Variable) -> str:
    return f"{variable.name}={','.join(variable.value.split())}"


def _number(variable: _Variable) -> int:
    if not variable.value.isdecimal():
        raise ValueError(f"{_shown(variable)}: expected a number, or trainer.node_rank, which counts in its place")
    return int(variable.value)


def _first_of(hosts: _Variable) -> str:
    return first_host(Path(hosts.value).read_text() if hosts.name == _NODE_FILE else hosts.value)
