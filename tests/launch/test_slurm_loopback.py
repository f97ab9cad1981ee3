"""What `megarl launch slurm` prints, under Slurm itself: its daemons on loopback; all three nodes are this machine."""

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ring_cases import lines, make_parts, settings, steps

from megarl.commands.launch.command import launch_file, parse
from megarl.config import read_yaml
from megarl.servers.server_process import free_ports
from megarl.trainer.checkpoint.checkpoint import all_checkpoints

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol")
GRPO = [
    "algorithm.adv_estimator=grpo",
    "data.val_files=[]",
    "trainer.n_gpus_per_node=1",
    "trainer.master_addr=127.0.0.2",
]
CONF = """
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdTimeout=20
KillWait=120
MinJobAge=3600
"""
NODE = "NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000 State=UNKNOWN\n"
PARTITION = "PartitionName=main Nodes=n[1-3] Default=YES MaxTime=60 State=UP OverSubscribe=EXCLUSIVE\n"


class Slurm:
    """The daemons, and the commands that users have."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._daemons = folder, dict[str, subprocess.Popen[bytes]]()
        host, ports = socket.gethostname().partition(".")[0], free_ports(["127.0.0.1"] * 4)
        text = CONF.format(host=host, user=getpass.getuser(), folder=folder, ports=ports)
        text += "".join(NODE.format(number=k, host=host, port=ports[k]) for k in (1, 2, 3)) + PARTITION
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("MEGARL_TOKEN", "SLURM_"))}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT)}

    def start(self) -> None:
        where = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        options = [f"--{name}={self.folder}/{file}" for name, file in {**where, "seed-file": "munge.seed"}.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        self.wait_until((self.folder / "munge.socket").exists, 60)
        self._daemon("slurmctld", "-D")
        for number in (1, 2, 3):
            self._daemon("slurmd", "-D", "-N", f"n{number}")
        self.wait_until(lambda: self.says("sinfo", "--noheader", "--format=%D %T") == "3 idle", 120)

    def _daemon(self, program: str, *words: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            started = subprocess.Popen([program, *words], env=self.environment, stdout=log, stderr=log)
        self._daemons[words[-1] if program == "slurmd" else program] = started

    def stop(self) -> None:
        with suppress(subprocess.SubprocessError, AssertionError):  # the daemons end all the same
            self.says("scancel", "--user", getpass.getuser())
            self.wait_until(lambda: self.says("squeue", "--noheader") == "", 60)
        for daemon in self._daemons.values():
            daemon.terminate()
        for daemon in self._daemons.values():
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """The daemons, their helpers, and all processes of jobs."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    found.append(process)
        return found

    def says(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number: str, field: str) -> str:
        found = re.search(rf"\b{field}=(\S+)", self.says("scontrol", "show", "job", "--oneliner", number))
        assert found is not None, field
        return found[1]

    def submit(self, folder: Path, words: list[str], *options: str) -> str:
        """From a folder that has nothing of the repository."""
        script = folder / "run.sbatch"
        script.write_text(launch_file(parse(["slurm", *words]))[1])
        command = ["sbatch", "--parsable", *options, script]
        done = subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def wait_until(self, condition: Callable[[], object], limit_s: float, log: Path | None = None) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            text = log.read_text() if log is not None and log.exists() else ""
            assert time.monotonic() < deadline, text or (self.folder / "daemons.log").read_text()
            time.sleep(0.2)

    def lose(self, node: str) -> None:
        """As when its machine loses power: slurmd, slurmstepd and what runs in its job, without a word."""
        victims = [self._daemons[node].pid]
        for process in self.processes():
            with suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == node:
                    victims.append(process.pid)
                    parent = process.parent()
                    if parent is not None and parent.name().startswith("slurmstepd"):
                        victims.append(parent.pid)
        for pid in dict.fromkeys(victims):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        pytest.fail(f"{', '.join(missing)}: not found; tests marked slurm need `apt-get install slurm-wlm munge`")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path may have 107 characters
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


def words_of(parts: Path, folder: Path, name: str, num_steps: int) -> list[str]:
    steps = f"trainer.total_training_steps={num_steps}"
    return settings(parts, folder / "runs", name, *GRPO, "trainer.nnodes=2", steps)


def finished_steps(run: Path) -> list[int]:
    return sorted(steps(run, "actor/pg_loss")) if (run / "metrics.jsonl").exists() else []


def test_a_job_on_two_nodes_finishes(slurm: Slurm, parts: Path, tmp_path: Path) -> None:
    job = slurm.submit(tmp_path, words_of(parts, tmp_path, "whole", 2))
    log = tmp_path / f"slurm-{job}.log"
    slurm.wait_until(lambda: slurm.job(job, "JobState") not in ("PENDING", "RUNNING", "COMPLETING"), 600, log)
    assert slurm.job(job, "JobState") == "COMPLETED", log.read_text()
    assert finished_steps(tmp_path / "runs/whole") == [1, 2]
    assert "1: machine 1 of 2" in log.read_text()
    assert not list(tmp_path.glob(".megarl_token*"))


def test_signal_tree_a_job_saves_when_it_is_asked_or_near_its_limit_or_cancelled(
    slurm: Slurm, parts: Path, tmp_path: Path
) -> None:
    """Only the limit lets it be requeued; Slurm signals every process of the job's step."""
    words = [*words_of(parts, tmp_path, "long", 1000), "trainer.term_grace_s=110"]
    job = slurm.submit(tmp_path, [*words, "--time", "60"])
    run, log = tmp_path / "runs/long", tmp_path / f"slurm-{job}.log"
    slurm.wait_until(lambda: finished_steps(run), 600, log)
    slurm.says("scancel", "--signal=USR1", job)
    slurm.wait_until(lambda: re.search(r"SIGUSR1: step \d+ is saved", log.read_text()), 300, log)
    slurm.says("scontrol", "update", f"JobId={job}", "TimeLimit=3")
    slurm.wait_until(lambda: slurm.job(job, "JobState") == "PENDING", 300, log)
    # Slurm would wait two minutes.  A node refuses a job in the second in which it has ended the one before.
    slurm.says("scontrol", "update", f"JobId={job}", "TimeLimit=60", "StartTime=now+3")
    going_on = r"going on from step \d+"
    slurm.wait_until(lambda: re.search(going_on, log.read_text()) or slurm.job(job, "JobState") == "FAILED", 600, log)
    assert (slurm.job(job, "JobState"), slurm.job(job, "Restarts")) == ("RUNNING", "1"), log.read_text()
    saved = r"SIGTERM: step (\d+) is finished, step \1 is saved; the same command goes on from there"
    (first,) = set(re.findall(saved, log.read_text()))
    assert f"going on from step {first}" in log.read_text()
    slurm.wait_until(lambda: max(finished_steps(run)) > int(first), 600, log)
    slurm.says("scancel", job)
    slurm.wait_until(lambda: slurm.job(job, "JobState") not in ("RUNNING", "COMPLETING"), 600, log)
    assert (slurm.job(job, "JobState"), slurm.job(job, "Restarts")) == ("CANCELLED", "1")
    said = log.read_text()
    last = max(finished_steps(run))
    assert f"SIGTERM: step {last} is finished, step {last} is saved" in said
    assert all_checkpoints(run / "checkpoints")[-1].step == last
    assert "ended with exit code" not in said and "warning" not in said, said
    assert not list(tmp_path.glob(".megarl_token*"))


def test_elements_of_an_array_are_runs_of_their_own(slurm: Slurm, parts: Path, tmp_path: Path) -> None:
    words = settings(parts, tmp_path / "runs", "seed_%a", *GRPO[:-1], "trainer.total_training_steps=1")
    job = slurm.submit(tmp_path, [*words, "trainer.seed=%a", "--array", "3-4"])
    logs = [tmp_path / f"slurm-{job}_{element}.log" for element in (3, 4)]
    slurm.wait_until(lambda: slurm.says("squeue", "--noheader") == "", 600, logs[-1])
    for element, log in zip((3, 4), logs, strict=True):
        run = tmp_path / f"runs/seed_{element}"
        assert finished_steps(run) == [1], log.read_text()
        assert read_yaml(run / "config.yaml").trainer.seed == element


PLACE = """
import os
from megarl.commands.places import place_in
found = place_in(os.environ)
print(*found[:4] if found else ["nowhere"])
"""


@pytest.mark.parametrize(
    ("options", "command", "said"),
    [
        (["--nodes=1", ":", "--nodes=2"], "srun --het-group=0,1 {python} -c '{place}'", "srun 2 3 n1\n"),
        (["--nodes=2"], "{python} -c '{place}'", "nowhere\n"),
        (
            ["--nodes=2"],
            "srun --ntasks-per-node=1 {python} -m megarl train recipe=quickstart",
            "error: trainer.nnodes=1: srun has 2 machines (SLURM_STEP_NUM_NODES=2); expected the same number, or",
        ),
        (
            ["--nodes=2"],
            "srun --nodes=2 --ntasks=4 {python} -m megarl train recipe=quickstart trainer.nnodes=2",
            "error: SLURM_STEP_TASKS_PER_NODE=2(x2): srun starts 2 processes on a machine; expected 1",
        ),
    ],
    ids=["heterogeneous", "without srun", "nnodes forgotten", "two tasks a node"],
)
def test_a_process_knows_its_place(slurm: Slurm, tmp_path: Path, options: list[str], command: str, said: str) -> None:
    script, log = tmp_path / "job.sh", tmp_path / "log"
    script.write_text("#!/bin/bash\n" + command.format(python=sys.executable, place=PLACE) + "\n")
    slurm.says("sbatch", f"--output={log}", *options, str(script))
    slurm.wait_until(lambda: slurm.says("squeue", "--noheader") == "" and log.exists(), 300, log)
    assert said in log.read_text()


def test_a_spare_node_takes_the_place_of_one_that_is_lost(slurm: Slurm, parts: Path, tmp_path: Path) -> None:
    """The last test: Slurm has no such node any more."""
    words = [*words_of(parts, tmp_path, "spare", 6), "trainer.save_freq=1", "trainer.spare_nodes=1"]
    job = slurm.submit(tmp_path, words)
    run, log = tmp_path / "runs/spare", tmp_path / f"slurm-{job}.log"
    slurm.wait_until(lambda: 2 in finished_steps(run), 600, log)
    slurm.lose("n2")
    slurm.wait_until(lambda: slurm.job(job, "JobState") not in ("PENDING", "RUNNING", "COMPLETING"), 600, log)
    assert slurm.job(job, "JobState") == "COMPLETED", log.read_text()
    assert re.search(r"machine 1 \(host .*\) takes the place of host .*, which is lost", log.read_text())
    assert finished_steps(run) == [*range(1, 7)] and lines(run / "visits.jsonl")[-1]["step"] == 6
