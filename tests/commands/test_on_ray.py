"""`megarl train --on ray` on Ray itself: a head and three nodes on this machine, in a network of loopback alone."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ring_cases import make_parts, settings, steps

from megarl.cli import main
from megarl.trainer.checkpoint.checkpoint import all_checkpoints

ROOT = Path(__file__).parents[2]
RAY = ROOT / ".venv-ray" / "bin"
GRPO = ["algorithm.adv_estimator=grpo", "data.val_files=[]", "rollout.num_servers=2"]
HEAD = "127.0.0.1"
NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


class Cluster:
    """A head without CPUs, and nodes that each have room for one machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._net = subprocess.Popen(["unshare", "--net", "sh", "-c", "ip link set lo up && exec sleep infinity"])
        self._env = {**os.environ, "PATH": f"{RAY}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self._env |= {"RAY_ADDRESS": f"http://{HEAD}:8265"}
        self._env |= {"SLURM_NODEID": "3", "SLURM_STEP_NUM_NODES": "4"}  # Slurm may have started the Ray nodes
        self._env = {name: value for name, value in self._env.items() if not name.startswith("MEGARL_TOKEN")}

    def start(self) -> None:
        self.wait_until(lambda: psutil.Process(self._net.pid).name() == "sleep", 30)
        self.says("ray", "start", "--head", f"--node-ip-address={HEAD}", "--num-cpus=0", *self._options(HEAD))
        for node in NODES:
            self.says("ray", "start", f"--address={HEAD}:6379", f"--node-ip-address={node}", *self._options(node))

    def _options(self, node: str) -> list[str]:
        more = ["--port=6379", "--include-dashboard=true"] if node == HEAD else ["--num-cpus=1"]
        return [*more, f"--temp-dir={self._folder}/{node.rpartition('.')[2]}", "--disable-usage-stats"]

    def stop(self) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self._net.kill()
        self._net.wait()

    def processes(self) -> list[psutil.Process]:
        """Ray's, and all that its jobs have started: those in the network of this cluster."""
        found, mine = [], os.readlink(f"/proc/{self._net.pid}/ns/net")
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid != self._net.pid and os.readlink(f"/proc/{process.pid}/ns/net") == mine:
                    found.append(process)
        return found

    def says(self, *words: str) -> str:
        command = ["nsenter", f"--target={self._net.pid}", "--net", *words]
        where = {"env": self._env, "cwd": self._folder, "timeout": 120}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **where)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, name: str, words: list[str]) -> None:
        self.says(
            "ray", "job", "submit", "--no-wait", "--submission-id", name, "--", "megarl", "train", "--on", "ray", *words
        )

    def status(self, name: str) -> str:
        return re.findall(
            r"(RUNNING|PENDING|SUCCEEDED|FAILED|STOPPED)", self.says("ray", "job", "status", name).upper()
        )[-1]

    def log(self, name: str) -> str:
        return re.sub(r"\x1b\[\d+m", "", self.says("ray", "job", "logs", name))

    def wait_until(self, condition: Callable[[], object], limit_s: float, job: str = "") -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, self.log(job) if job else "it took too long"
            time.sleep(0.5)

    def child(self, rank: int, words: list[str]) -> psutil.Process:
        """The megarl of a machine, below its actor."""
        name = next(word for word in words if word.startswith("trainer.experiment_name="))
        (found,) = [
            process
            for process, line in self.lines()
            if {"megarl.commands.on_ray", name, f"trainer.node_rank={rank}"} <= set(line)
        ]
        return found

    def lines(self) -> Iterator[tuple[psutil.Process, list[str]]]:
        """Processes with their command lines."""
        for process in self.processes():
            with suppress(psutil.Error):
                yield process, process.cmdline()

    def left_of_runs(self) -> list[list[str]]:
        """Command lines of what megarl has started: on CPUs forks of a process that imports it."""
        return [line for _, line in self.lines() if any(re.search(r"\bmegarl\.[a-z]", word) for word in line)]

    def lose(self, node: str) -> None:
        """As when its machine loses power."""
        for process in self.processes():
            with suppress(psutil.Error):
                if "raylet" in process.name() and f"--node_ip_address={node}" in process.cmdline():
                    process.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not (RAY / "ray").exists():
        pytest.fail(f"{RAY}: not there; tests marked ray need `bash launch/ray.sh`")
    made = Cluster(tmp_path_factory.mktemp("ray"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


def words_of(parts: Path, runs: Path, name: str, num_steps: int, *more: str) -> list[str]:
    return settings(parts, runs, name, *GRPO, f"trainer.total_training_steps={num_steps}", *more)


def numbers(run: Path) -> list[tuple[float, float]]:
    score, norm = steps(run, "critic/score/mean"), steps(run, "actor/grad_norm")
    return [(score[step], norm[step]) for step in sorted(norm)]


TWO = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1")


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_job_on_two_ray_nodes_learns_what_a_run_on_one_machine_does(
    cluster: Cluster, parts: Path, tmp_path: Path
) -> None:
    cluster.submit("two", words_of(parts, tmp_path, "two", 3, *TWO))
    assert main(["train", *words_of(parts, tmp_path, "one", 3)]) == 0
    cluster.wait_until(lambda: cluster.status("two") in ("SUCCEEDED", "FAILED"), 300, "two")
    said = cluster.log("two")
    assert cluster.status("two") == "SUCCEEDED", said
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")
    addresses = re.findall(r"machine [01] is (\S+), in", said)
    assert len(addresses) == len(set(addresses)) == 2
    assert set(addresses) <= set(NODES)
    assert not re.search("[\u2500-\u257f]", said), "a table in characters that logs cannot show"
    assert not cluster.left_of_runs()


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_an_actor_and_the_node_of_machine_0_may_be_lost_and_ray_job_stop_saves(
    cluster: Cluster, parts: Path, tmp_path: Path
) -> None:
    words, run = words_of(parts, tmp_path, "lost", 1000, *TWO, "trainer.save_freq=1"), tmp_path / "lost"
    cluster.submit("lost", words)

    def last() -> int:
        return max(steps(run, "actor/grad_norm"), default=0) if (run / "metrics.jsonl").exists() else 0

    cluster.wait_until(lambda: last() >= 2, 300, "lost")
    actor = cluster.child(1, words).parent()
    assert actor is not None
    actor.kill()
    cluster.wait_until(lambda: "going on from step" in cluster.log("lost"), 300, "lost")
    before = last()
    cluster.wait_until(lambda: last() > before, 300, "lost")
    first = re.findall(r"machine 0 is (\S+), in", cluster.log("lost"))[-1]
    cluster.lose(first)
    cluster.wait_until(lambda: len(re.findall(r"machine 0 is (\S+), in", cluster.log("lost"))) > 1, 300, "lost")
    assert re.findall(r"machine 0 is (\S+), in", cluster.log("lost"))[-1] != first
    before = last()
    cluster.wait_until(lambda: last() > before, 300, "lost")
    cluster.says("ray", "job", "stop", "--no-wait", "lost")
    megarls = [process for process, line in cluster.lines() if "megarl.commands.on_ray" in line]
    gone, alive = psutil.wait_procs(megarls, timeout=120)
    assert not alive, alive
    trained = last()
    assert all_checkpoints(run / "checkpoints")[-1].step == trained, "the last step is saved"
    assert json.loads((run / "status.json").read_text())["stage"] == "ended"
    cluster.wait_until(lambda: not cluster.left_of_runs(), 60)


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_no_actor_is_left_if_entry_point_and_machine_0_are_lost_together(
    cluster: Cluster, parts: Path, tmp_path: Path
) -> None:
    def found(word: str) -> list[psutil.Process]:
        return [process for process, line in cluster.lines() if any(word in part for part in line)]

    cluster.wait_until(lambda: not found("ray::Machine"), 120)
    cluster.submit("gone", words_of(parts, tmp_path, "gone", 1000, "trainer.n_gpus_per_node=1"))
    cluster.wait_until(lambda: found("megarl.commands.on_ray"), 120, "gone")
    (actor,) = found("ray::Machine")
    for process in (*found("train --on"), *found("--on"), actor):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    cluster.wait_until(lambda: [each for each in found("ray::Machine") if each.pid != actor.pid], 120)
    cluster.wait_until(lambda: not found("ray::Machine"), 180)
    cluster.wait_until(lambda: not cluster.left_of_runs(), 60)


def test_on_ray_is_refused_in_a_sentence_without_ray_or_for_another_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    assert main(["train", "--on", "ray", "recipe=quickstart"]) == 2
    assert "RAY_ADDRESS=http://127.0.0.1:8265: expected HOST:6379 of the cluster's" in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert main(["train", "--on", "spark", "recipe=quickstart"]) == 2
    assert "megarl train --on spark: expected `megarl train --on ray ...`" in capsys.readouterr().err
    assert main(["plan", "--on", "ray", "recipe=quickstart"]) == 2
    assert main(["train", "--on", "ray", "recipe=quickstart", "trainer.resume_mode=disable"]) == 2
    assert "trainer.resume_mode=disable: a machine 0 that is placed again would begin anew" in capsys.readouterr().err
    assert main(["train", "--on", "ray", "recipe=quickstart"]) == 2
    assert (
        "--on ray: No module named 'ray'; expected the package ray (pip install 'megarl[ray]')"
        in capsys.readouterr().err
    )
