"""How a job of launch/slurm.sbatch ends: stand-ins for srun, scontrol and python write down what they are told."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
# The first machine of a step.
SRUN = """
while [ "$1" != bash ]; do shift; done
SLURM_NODEID=0 exec "$@"
"""
# The driver, which goes on until it is asked to save and to end.
PYTHON = """
[ -z "${ENDS:-}" ] || exit "$ENDS"
trap 'touch saved; exit 143' TERM
touch trains
while true; do sleep 0.05; done
"""


def submit(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    commands = folder / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "python": PYTHON, "scontrol": ""}.items():
        (commands / name).write_text(f'#!/usr/bin/env bash\necho "$*" >>said_to_{name}\n{text}')
        (commands / name).chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith("MEGARL_TOKEN")}
    env |= {"PATH": f"{commands}:{env['PATH']}", "MEGARL_ROOT": str(LAUNCH.parent), "SLURM_SUBMIT_DIR": str(folder)}
    env |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host[0-1]"}
    env |= {"SLURM_CPUS_ON_NODE": "96", "CONTAINER_IMAGE": "/shared/megarl.sqsh"}  # so that python is our stand-in
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "recipe=quickstart", *words]
    return subprocess.Popen(command, cwd=folder, env=env | environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("number", "requeues"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)], ids=["the limit is near", "cancelled"]
)
def test_a_job_that_must_end_asks_its_driver_to_save_first(
    tmp_path: Path, number: signal.Signals, requeues: bool
) -> None:
    """After the warning before the time limit it is requeued."""
    with submit(tmp_path) as job:
        while not (tmp_path / "trains").exists():
            assert job.poll() is None, job.communicate()
            time.sleep(0.02)
        job.send_signal(number)
        _, said = job.communicate(timeout=120)
    assert (job.returncode, said) == (143, "")
    assert (tmp_path / "saved").exists()
    told = tmp_path / "said_to_scontrol"
    assert (told.read_text() if told.exists() else "") == ("requeue 7\n" if requeues else "")
    assert not list(tmp_path.glob(".megarl_token*"))


@pytest.mark.parametrize("status", [0, 1])
def test_a_job_ends_as_its_driver_does_and_is_not_requeued(tmp_path: Path, status: int) -> None:
    with submit(tmp_path, ENDS=str(status)) as job:
        _, said = job.communicate(timeout=120)
    assert (job.returncode, said) == (status, "")
    assert not (tmp_path / "said_to_scontrol").exists()


def test_a_job_that_would_begin_anew_each_time_it_is_requeued_is_refused(tmp_path: Path) -> None:
    with submit(tmp_path, "trainer.resume_mode=disable", ENDS="0") as job:
        _, said = job.communicate(timeout=120)
    assert job.returncode == 2
    assert "trainer.resume_mode=disable: a job that is requeued would begin anew" in said
    assert not (tmp_path / "said_to_srun").exists()


def test_spare_machines_are_of_the_trainers_step_which_may_lose_one(tmp_path: Path) -> None:
    with submit(tmp_path, ENDS="0", SPARE_NODES="1") as job:
        job.communicate(timeout=120)
    said = (tmp_path / "said_to_srun").read_text()
    assert said.startswith("--nodes=2 --ntasks=2 --ntasks-per-node=1 --relative=0 --label ")
    # sbatch --no-kill keeps the job: a step that spans its machines is ended with one of them unless it says so too.
    assert " --label --no-kill --wait=0 --kill-on-bad-exit=0 " in said
    assert said.endswith(
        "megarl train recipe=quickstart trainer.nnodes=1 trainer.term_grace_s=540 trainer.spare_nodes=1\n"
    )
