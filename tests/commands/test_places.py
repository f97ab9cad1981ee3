"""Where a process stands among the machines of a run, as schedulers and launchers tell it."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from megarl.commands.places import LAUNCHERS, first_host, place_in
from megarl.commands.this_machine import choose_engine, described_place, placed
from megarl.config import Config

# As Slurm 22.05 gives them to the third task of `srun --het-group=0,1`, of a job of one and two nodes.
HETEROGENEOUS = {
    **{"SLURM_NODEID": "2", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_HET_SIZE": "2"},
    **{"SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2", "SLURM_JOB_NUM_NODES": "3"},
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[7-8]"}
SRUN = {**BATCH, "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[007-008]"}
SRUN |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
MPIRUN = {f"OMPI_COMM_WORLD_{name}": value for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_SIZE": "1"}.items()}
SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m"}
TRAINJOB = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "job-node-0-0.job"}
VOLCANO = {"VC_TASK_INDEX": "1", "VC_WORKER_NUM": "2", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job"}
TWO_TASKS = {"VC_TASK_INDEX": "0", "VC_MASTER_NUM": "1", "VC_MASTER_HOSTS": "m", "VC_WORKER_NUM": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}


def place(environment: Mapping[str, str], nnodes: int = 2, **trainer: object) -> tuple[int, str]:
    config = Config()
    config.trainer.nnodes = nnodes
    for name, value in trainer.items():
        setattr(config.trainer, name, value)
    found = placed(config, environment).trainer
    return found.node_rank or 0, found.master_addr


FOUND = {
    "srun": (SRUN, 2, (1, "gpu007")),
    "srun over both components of a heterogeneous job": (HETEROGENEOUS, 3, (2, "n1")),
    "srun, and names that its batch script has set for torchrun": (
        SRUN | {"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "other"},
        *(2, (1, "gpu007")),
    ),
    "mpirun": (MPIRUN | {"MASTER_ADDR": "m"}, 2, (1, "m")),
    "mpirun, and the step in which it has started its daemon": (
        SRUN | MPIRUN | {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"},
        *(2, (1, "gpu007")),
    ),
    "mpirun without an address": (MPIRUN, 2, (1, "127.0.0.1")),
    "mpiexec in a job of PBS": (HYDRA | {"PBS_NODENUM": "0"}, 2, (1, "127.0.0.1")),
    "SkyPilot": (SKY, 2, (1, "10.0.0.1")),
    "TrainJob": (TRAINJOB | {"JOB_COMPLETION_INDEX": "1"}, 2, (1, "job-node-0-0.job")),
    "PyTorchJob, which counts ranks": (TRAINJOB | {"RANK": "1", "WORLD_SIZE": "16"}, 2, (1, "job-node-0-0.job")),
    "an older PyTorchJob": (BY_HAND, 2, (1, "m")),
    "Volcano": (VOLCANO, 2, (1, "job-worker-0.job")),
    "Volcano with two tasks and its plug-in for PyTorch": (TWO_TASKS | BY_HAND, 2, (1, "m")),
    "an Indexed Job": ({"JOB_COMPLETION_INDEX": "1"}, 2, (1, "127.0.0.1")),
    "an Indexed Job with an address": ({"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "m"}, 2, (1, "m")),
    "a JobSet of one Job": ({"JOB_INDEX": "0", "JOB_COMPLETION_INDEX": "1"}, 2, (1, "127.0.0.1")),
    "a JobSet of a Job for each machine": ({"JOB_INDEX": "1", "JOB_COMPLETION_INDEX": "0"}, 2, (1, "127.0.0.1")),
    "one machine": (SKY | {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"}, 1, (0, "127.0.0.1")),
    "a batch script without srun, alone": (BATCH, 1, (0, "127.0.0.1")),
    "nothing": ({}, 1, (0, "127.0.0.1")),
}


@pytest.mark.parametrize(("environment", "nnodes", "wanted"), FOUND.values(), ids=FOUND)
def test_the_environment_tells_the_number_and_the_first_machine(
    environment: Mapping[str, str], nnodes: int, wanted: tuple[int, str]
) -> None:
    assert place(environment, nnodes) == wanted


def test_the_nodes_of_pbs_are_in_a_file(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("r1n4\nr1n4\nr1n5\n")
    assert place({"PBS_NODENUM": "1", "PBS_NODEFILE": str(nodes)}) == (1, "r1n4")
    assert place(MPIRUN | {"PBS_NODEFILE": str(nodes)}) == (1, "r1n4")
    nodes.unlink()  # as in a container, where the variable came along
    assert place(MPIRUN | {"PBS_NODEFILE": str(nodes)}) == (1, "127.0.0.1")


def test_every_launcher_of_the_table_is_tried_here() -> None:
    tried = {found.launcher for environment, *_ in FOUND.values() if (found := place_in(environment))}
    assert tried == {launcher.name for launcher in LAUNCHERS} - {"PBS"}


@pytest.mark.parametrize(
    ("environment", "nnodes", "sentence"),
    [
        (SRUN, 4, r"trainer.nnodes=4: srun has 2 machines \(SLURM_STEP_NUM_NODES=2\); expected the same number$"),
        (SRUN, 1, r"trainer.nnodes=1: srun has 2 machines .* or trainer.node_rank=0 for a run of this machine alone"),
        (SKY, 1, r"trainer.nnodes=1: SkyPilot has 2 machines \(SKYPILOT_NUM_NODES=2\)"),
        (MPIRUN, 1, r"trainer.nnodes=1: mpirun has 2 machines \(OMPI_COMM_WORLD_SIZE=2\)"),
        (BY_HAND, 1, r"trainer.nnodes=1: the environment has 2 machines \(WORLD_SIZE=2\)"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1,4"}, 2, r"SLURM_STEP_TASKS_PER_NODE=1,4: srun starts 4 processes"),
        (
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"},
            2,
            r"starts 8 processes on a machine; expected 1, as .* itself$",
        ),
        (
            {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "8"},  # srun --pty bash
            *(1, r"STEP_TASKS_PER_NODE=8: .*, or trainer.node_rank=0 for a run of this machine alone"),
        ),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2, r"OMPI_COMM_WORLD_LOCAL_SIZE=2: mpirun starts 2 processes"),
        ({"JOB_COMPLETION_INDEX": "2"}, 2, r"this is machine 2, counted from 0 \(JOB_COMPLETION_INDEX=2\); expected"),
        ({"JOB_COMPLETION_INDEX": "1"}, 1, r"trainer.nnodes=1: this is machine 1, .* or trainer.node_rank=0 for a run"),
        ({"JOB_COMPLETION_INDEX": "1", "JOB_INDEX": "2"}, 4, r"JOB_INDEX=2, JOB_COMPLETION_INDEX=1: two numbers of"),
        (TRAINJOB | {"PET_NNODES": "1:4"}, 2, r"PET_NNODES=1:4: expected a number, or trainer.node_rank"),
        (TWO_TASKS, 2, r"trainer.nnodes=2: no variable of a scheduler says which of the machines this is; expected"),
        ({}, 2, r"trainer.nnodes=2: no variable of a scheduler .*trainer.node_rank=0 on the first one, 1 on the next$"),
        (BATCH, 2, r"trainer.node_rank=0 on the first one, 1 on the next, or `srun --ntasks-per-node=1 megarl"),
        ({"TORCHELASTIC_RUN_ID": "none"}, 1, r"torchrun: expected `megarl train` itself on each machine"),
        ({"TORCHELASTIC_RUN_ID": "none"}, 2, r"torchrun: expected `megarl train` itself on each machine"),
    ],
)
def test_what_does_not_fit_the_settings_or_tells_no_number_is_refused(
    environment: Mapping[str, str], nnodes: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        place(environment, nnodes)


def test_spare_machines_are_machines_of_the_job() -> None:
    assert place(HETEROGENEOUS, 2, spare_nodes=1) == (2, "n1")
    with pytest.raises(ValueError, match="trainer.nnodes=1 trainer.spare_nodes=1: srun has 3 machines"):
        place(HETEROGENEOUS, 1, spare_nodes=1)


def test_what_the_settings_say_counts() -> None:
    """A number that is given is of machines that their starter knows, whatever started the processes around."""
    assert place(SRUN, master_addr="10.1.2.3") == (1, "10.1.2.3")
    for alone in (SRUN, MPIRUN, SKY, {"JOB_COMPLETION_INDEX": "3"}):
        assert place(alone, nnodes=1, node_rank=0) == (0, "127.0.0.1")
    assert place({"JOB_COMPLETION_INDEX": "0"}, nnodes=3, node_rank=2) == (2, "127.0.0.1")
    assert place({"MASTER_ADDR": "m"}, nnodes=3, node_rank=0) == (0, "m")


def test_the_settings_of_the_first_machine_are_those_of_all() -> None:
    """Its config.yaml, given to another machine, does not make that the first one."""
    config = Config()
    config.trainer.nnodes = 2
    assert placed(config, SRUN | {"SLURM_NODEID": "0"}).trainer.node_rank is None


def test_a_check_of_a_run_on_many_machines_asks_for_no_place() -> None:
    config = Config()
    config.trainer.nnodes, config.trainer.check_only, config.rollout.engine = 2, True, "hf"
    assert choose_engine("sft", [], config) == "hf"


def test_for_people_it_says_what_it_reads_and_whether_the_settings_fit() -> None:
    found, mend = described_place(Config(), SRUN)
    assert found == (
        "machine 1 of 2, the driver at gpu007 (SLURM_NODEID=1, SLURM_STEP_NUM_NODES=2, "
        "SLURM_STEP_NODELIST=gpu[007-008], SLURM_STEP_TASKS_PER_NODE=1(x2))"
    )
    assert mend.startswith("trainer.nnodes=1: srun has 2 machines")
    config = Config()
    config.trainer.nnodes = 2
    found, mend = described_place(config, SKY)
    assert (found.partition(" (")[0], mend) == ("machine 1 of 2, the driver at 10.0.0.1", "")
    alone = "machine 0 of 1, the driver at 127.0.0.1 (no variable of a scheduler)"
    assert described_place(Config(), {}) == (alone, "")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[007-012,40],login1", "gpu007"),
        ("gpu[3,5]-ib", "gpu3-ib"),
        ("127.0.0.[1-2]", "127.0.0.1"),
        ("rack1-gpu[3],rack2-gpu[4]", "rack1-gpu3"),
        ("10.0.0.1\n10.0.0.2", "10.0.0.1"),
        ("fd00::1 fd00::2", "fd00::1"),
    ],
)
def test_the_first_name_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
