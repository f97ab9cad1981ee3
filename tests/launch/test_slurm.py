"""The commands of what `megarl launch slurm` prints, under stand-ins for sbatch, srun and scontrol.

Each node of the job is a loopback address of this machine.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ring_cases import PPO, make_parts, settings

from megarl.servers.server_process import free_ports

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]
FAKES = Path(__file__).parent / "fake_slurm"


def submit(folder: Path, words: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MEGARL_TOKEN")}
    env |= {"PATH": f"{FAKES}:{env['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megarl", "launch", "slurm", *words, "--submit"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s)


def on_a_node_of_their_own(port: int) -> list[str]:
    return ["--server-machines", "1", "--server-port", str(port)]


def processes_of(folder: Path, port: int) -> list[str]:
    """Command lines of a job in this folder that still run: its server, and whatever else stands in the folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            serves = any(words[i : i + 2] == ["--port", str(port)] for i in range(len(words)))
            if serves or f":{port}" in " ".join(words) or process.cwd() == str(folder):
                found.append(" ".join(words))
    return found


def test_processes_that_a_job_leaves_are_seen(tmp_path: Path) -> None:
    """A server is known by its port, and a rank by the folder where it was started."""
    (port,) = free_ports(["127.0.0.1"])
    idle = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
    for words, folder in (([*idle, "--port", str(port)], Path("/")), ([*idle, "-m", "megarl.roles.worker"], tmp_path)):
        with subprocess.Popen(words, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()  # until its words stand in the system's table: a moment after Popen returns
            (found,) = processes_of(tmp_path, port)
            assert found == " ".join(words)
            process.stdin.close()
    assert not processes_of(tmp_path, port)


@pytest.mark.full
def test_trainer_and_servers_on_nodes_of_their_own(tmp_path: Path) -> None:
    """Two nodes train, the third serves; the job leaves neither processes nor its token."""
    parts = make_parts(tmp_path / "parts")
    master, server = free_ports(["127.0.0.1", "127.0.0.3"])
    more = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", f"trainer.master_port={master}"]
    words = settings(parts, tmp_path / "runs", "apart", *PPO, *more)
    found = submit(tmp_path, [*words, *on_a_node_of_their_own(server)], 250)
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"serving at https://127.0.0.3:{server}" in found.stdout
    summary = json.loads((tmp_path / "runs/apart/summary.json").read_text())
    assert summary["pushes"] == summary["pushes_verified"] == 4
    assert not list(tmp_path.glob(".megarl_token*"))
    assert not processes_of(tmp_path, server)


@pytest.mark.full
def test_a_trainer_that_fails_takes_the_servers_of_its_job_with_it(tmp_path: Path) -> None:
    (server,) = free_ports(["127.0.0.2"])
    words = settings(make_parts(tmp_path / "parts"), tmp_path / "runs", "failed", "data.train_files=[/no/such/file]")
    found = submit(tmp_path, [*words, *on_a_node_of_their_own(server)], 120)
    assert found.returncode == 2, found.stdout + found.stderr
    assert "error: /no/such/file" in found.stderr
    assert not processes_of(tmp_path, server)
    assert not list(tmp_path.glob(".megarl_token*"))


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_quickstart_on_two_nodes_learns_to_carry(tmp_path: Path) -> None:
    (master,) = free_ports(["127.0.0.1"])
    words = ["quickstart", "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "rollout.num_servers=2"]
    words += [f"trainer.master_port={master}"]
    # The first steps of the whole job, whose learning rate falls over sixty: at the tenth it is at 0.85.
    words += ["trainer.total_training_steps=12", "actor.optim.lr_decay_steps=60", "critic.optim.lr_decay_steps=60"]
    found = submit(tmp_path, words, 1400)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    summary = json.loads((tmp_path / "runs/quickstart/summary.json").read_text())
    assert summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] >= 0.7
    assert summary["pushes"] == summary["pushes_verified"] == summary["steps"] + 1
