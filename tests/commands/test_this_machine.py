"""Where a process stands among the machines of a run, as Slurm and Kubernetes tell it."""

from collections.abc import Mapping

import pytest

from megarl.commands.this_machine import described_place, first_host, placed
from megarl.config import Config

SLURM = {"SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[007-008]", "SLURM_STEP_NUM_NODES": "2"}


def place(environment: Mapping[str, str], nnodes: int = 2, **trainer: object) -> tuple[int, str]:
    config = Config()
    config.trainer.nnodes = nnodes
    for name, value in trainer.items():
        setattr(config.trainer, name, value)
    found = placed(config, environment).trainer
    return found.node_rank, found.master_addr


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, (0, "127.0.0.1")),
        (SLURM, (1, "gpu007")),
        ({"SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "gpu3,gpu5"}, (0, "gpu3")),
        ({"JOB_COMPLETION_INDEX": "1"}, (1, "127.0.0.1")),
        ({"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "10.0.0.1"}, (1, "10.0.0.1")),
    ],
)
def test_the_environment_tells_the_number_and_the_first_machine(
    environment: Mapping[str, str], wanted: tuple[int, str]
) -> None:
    assert place(environment) == wanted


def test_for_people_it_says_what_it_reads_and_whether_the_settings_fit() -> None:
    """Also with trainer.nnodes=1, where a run reads nothing."""
    found, mend = described_place(Config(), SLURM)
    assert found.startswith("machine 1 of 2, the driver at gpu007 (SLURM_NODEID=1, SLURM_STEP_NODELIST=gpu[007-008], ")
    assert mend == "trainer.nnodes=2, or one process alone"
    alone = "machine 0 of 1, the driver at 127.0.0.1 (no variable of a scheduler)"
    assert described_place(Config(), {}) == (alone, "")


def test_what_the_settings_say_counts() -> None:
    assert place(SLURM, nnodes=2, master_addr="10.1.2.3") == (1, "10.1.2.3")
    assert place({"JOB_COMPLETION_INDEX": "0"}, nnodes=3, node_rank=2) == (2, "127.0.0.1")


def test_a_run_on_one_machine_asks_nobody() -> None:
    assert place(SLURM, nnodes=1) == (0, "127.0.0.1"), "as in a shell that some allocation of several machines gave"


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            SLURM | {"SLURM_STEP_NUM_NODES": "4"},
            r"trainer.nnodes=2: this srun has 4 \(SLURM_STEP_NUM_NODES\); expected",
        ),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "8"}, r"srun --ntasks-per-node=8: expected 1, megarl starts the ranks"),
        ({"JOB_COMPLETION_INDEX": "2"}, r"trainer.nnodes=2: this is machine 2, counted from 0; expected more"),
    ],
)
def test_another_number_of_machines_is_refused(environment: Mapping[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        place(environment)


@pytest.mark.parametrize("nnodes", [1, 2])
def test_a_run_that_torchrun_started_is_refused(nnodes: int) -> None:
    with pytest.raises(ValueError, match="torchrun: expected `megarl train` itself on each machine"):
        place({"TORCHELASTIC_RUN_ID": "none"}, nnodes)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[007-012,40],login1", "gpu007"),
        ("gpu[3,5]-ib", "gpu3-ib"),
        ("127.0.0.[1-2]", "127.0.0.1"),
        ("rack1-gpu[3],rack2-gpu[4]", "rack1-gpu3"),
    ],
)
def test_the_first_name_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
