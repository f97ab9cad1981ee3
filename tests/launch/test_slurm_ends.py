"""How a job of `megarl launch slurm` ends: stand-ins for srun, scontrol and python write down what they are told."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from config_helpers import load

from megarl.commands.launch.command import launch_file, parse

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


def submit(
    folder: Path, *words: str, srun: str = SRUN, scontrol: str = "", **environment: str
) -> subprocess.Popen[str]:
    commands = folder / "bin"
    commands.mkdir()
    for name, text in {"srun": srun, "python": PYTHON, "scontrol": scontrol}.items():
        (commands / name).write_text(f'#!/usr/bin/env bash\necho "$*" >>said_to_{name}\n{text}')
        (commands / name).chmod(0o755)
    script, given = folder / "run.sbatch", ["quickstart", "trainer.nnodes=2", *words]
    # An image, so that python is our stand-in.
    script.write_text(launch_file(parse(["slurm", *given, "--image", "/shared/megarl.sqsh"]))[1])
    nodes = re.search(r"--nodes=(\d+)", script.read_text())
    env = {k: v for k, v in os.environ.items() if not k.startswith("MEGARL_TOKEN")}
    env |= {"PATH": f"{commands}:{env['PATH']}", "SLURM_SUBMIT_DIR": str(folder), "SLURM_CPUS_ON_NODE": "96"}
    env |= {"SLURM_JOB_NUM_NODES": nodes[1] if nodes else "", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host[0-1]"}
    command = ["bash", script]
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


@pytest.mark.parametrize(
    ("ends", "restarts", "requeues"),
    [("0", "0", False), ("1", "19", True), ("1", "20", False), ("2", "0", False), ("143", "0", False)],
)
def test_a_job_ends_as_its_driver_does_and_is_requeued_after_a_failure(
    tmp_path: Path, ends: str, restarts: str, requeues: bool
) -> None:
    """Neither after a mistake in the settings nor after SIGTERM, and not for ever."""
    with submit(tmp_path, ENDS=ends, SLURM_RESTART_COUNT=restarts) as job:
        _, said = job.communicate(timeout=120)
    assert (job.returncode, said) == (int(ends), "")
    told = tmp_path / "said_to_scontrol"
    assert (told.read_text() if told.exists() else "") == ("requeue 7\n" if requeues else "")
    assert not list(tmp_path.glob(".megarl_token*"))


BOTH_END = """
while [ "$1" != bash ]; do shift; done
for machine in $ORDER; do
    ends=ENDS_$machine
    SLURM_NODEID=$machine ENDS=${!ends} "$@"
done
exit 137
"""


@pytest.mark.parametrize(
    ("order", "driver", "other", "spares", "status", "requeues"),
    [
        ("0 1", "2", "1", "0", 2, False),
        ("1 0", "2", "1", "0", 2, False),
        ("1 0", "143", "143", "0", 143, False),
        ("1 0", "143", "1", "1", 143, False),
        ("1 0", "143", "1", "0", 1, True),
        ("1 0", "1", "143", "1", 1, True),
        ("1 0", "0", "143", "1", 0, False),
    ],
    ids=[
        "a mistake",
        "a mistake, of which the other machine hears first",
        "both were asked to end",
        "a spare machine was there, and then the driver was asked to end",
        "srun has ended the driver after the other machine failed",
        "a machine was let go, and later the driver failed",
        "a machine was let go, and the run has come to its end",
    ],
)
def test_signal_tree_a_job_ends_as_its_driver_does_unless_another_machine_has_ended_that(
    tmp_path: Path, order: str, driver: str, other: str, spares: str, status: int, requeues: bool
) -> None:
    """srun tells the highest code of all tasks, and kills those that have not ended."""
    ends = {"ORDER": order, "ENDS_0": driver, "ENDS_1": other}
    with submit(tmp_path, f"trainer.spare_nodes={spares}", srun=BOTH_END, **ends) as job:
        job.communicate(timeout=120)
    assert (job.returncode, (tmp_path / "said_to_scontrol").exists()) == (status, requeues)


def test_a_warning_before_the_driver_is_there_requeues_the_job(tmp_path: Path) -> None:
    """As when it was submitted with a time limit that is about as long as the warning."""
    with submit(tmp_path, srun="touch waits\nexec sleep 600\n") as job:
        while not (tmp_path / "waits").exists():
            assert job.poll() is None, job.communicate()
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        job.communicate(timeout=120)
    assert job.returncode == 143
    assert (tmp_path / "said_to_scontrol").read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"MEGARL_TOKEN_DIR": "/no/such/folder"}, "/no/such/folder cannot be written, so the machines cannot share"),
        ({"SLURM_JOB_NUM_NODES": "3"}, "quickstart: --nodes=3: expected 2, as the settings in this file say"),
        ({"SLURM_ARRAY_TASK_ID": "1"}, "quickstart: --array: each element would be the same run; expected %a in"),
    ],
)
def test_a_job_that_could_not_go_on_is_refused(tmp_path: Path, environment: dict[str, str], told: str) -> None:
    with submit(tmp_path, ENDS="0", **environment) as job:
        _, said = job.communicate(timeout=120)
    assert job.returncode == 2 and told in said
    assert not (tmp_path / "said_to_srun").exists()


def test_words_after_the_script_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.sbatch").write_text(launch_file(parse(["slurm", "quickstart"]))[1])
    command = ["bash", tmp_path / "run.sbatch", "trainer.seed=2"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 2
    assert (
        "trainer.seed=2: the settings are in this file; expected them as words of `megarl launch slurm`" in found.stderr
    )


def test_an_element_of_an_array_runs_its_own_words(tmp_path: Path) -> None:
    words = ["trainer.experiment_name=seeds_%a", "trainer.seed=%a", "--array", "3-4"]
    with submit(tmp_path, *words, ENDS="0", SLURM_ARRAY_TASK_ID="4") as job:
        _, said = job.communicate(timeout=120)
    assert (job.returncode, said) == (0, "")
    assert " trainer.experiment_name=seeds_4 trainer.seed=4 " in (tmp_path / "said_to_srun").read_text()


def test_spare_machines_are_of_the_trainers_step_which_may_lose_one(tmp_path: Path) -> None:
    with submit(tmp_path, "trainer.spare_nodes=1", "trainer.term_grace_s=1740", ENDS="0") as job:
        job.communicate(timeout=120)
    said = (tmp_path / "said_to_srun").read_text()
    assert said.startswith("--nodes=3 --ntasks=3 --ntasks-per-node=1 --relative=0 --label ")
    # sbatch --no-kill keeps the job: a step that spans its machines is ended with one of them unless it says so too.
    assert " --label --no-kill --wait=0 --kill-on-bad-exit=0 " in said
    assert "#SBATCH --no-kill\n" in (tmp_path / "run.sbatch").read_text()
    words = said.split(" megarl train ")[1].split()
    assert words == ["recipe=quickstart", "trainer.nnodes=2", "trainer.spare_nodes=1", "trainer.term_grace_s=1740"]
    load(*words, "trainer.master_addr=10.0.0.1")  # the command accepts them


# The job ends with its trainer, and its servers then: so the trainer waits until they have begun.
BOTH = "until [ $(wc -l <said_to_srun) = 2 ]; do sleep 0.05; done\n"


def test_the_image_is_started_with_the_folders_that_were_named(tmp_path: Path) -> None:
    words = ["--mounts", "/models:/models", "--server-machines", "1"]
    with submit(tmp_path, *words, srun=BOTH, scontrol="echo host2") as job:
        _, said = job.communicate(timeout=120)
    assert (job.returncode, said) == (0, "")
    lines = (tmp_path / "said_to_srun").read_text().splitlines()
    server, trainer = sorted(lines, key=lambda line: "megarl train" in line)
    inside = f"--cpus-per-task=96 --cpu-bind=none --container-image=/shared/megarl.sqsh --container-workdir={tmp_path} "
    inside += f"--container-mounts={tmp_path}:{tmp_path},/models:/models"
    assert f"--kill-on-bad-exit=1 {inside} bash -c " in trainer
    assert " python -m megarl train recipe=quickstart trainer.nnodes=2" in trainer
    assert trainer.endswith(" rollout.placement=separate rollout.urls=[https://host2:30000]")
    assert f"{inside} python -m megarl serve recipe=quickstart" in server
    assert " --no-kill --wait=0 --kill-on-bad-exit=0 " in server, "one of them that is lost does not end the others"
