"""Whole small runs over two machines, each a process with an address of its own, and one that a server joins."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from programs import runs
from ring_cases import PPO, lines, settings, steps, wait_for_step

from megarl.cli import main
from megarl.io.auth import derived
from megarl.metrics.reading.jsonl import SAMPLES, VISITS
from megarl.rollout.client import ServerClient
from megarl.servers.server_process import free_ports

pytestmark = [pytest.mark.dist, pytest.mark.full]
COMMON = [*PPO, "rollout.num_servers=2", "trainer.total_training_steps=10", "trainer.save_freq=2"]
STARTED: list[subprocess.Popen[bytes]] = []
TOKEN = "the secret of these tests"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Also after a test that fails: an agent would wait half an hour for a driver."""
    yield
    for process in STARTED:
        process.kill()
        process.wait()
    STARTED.clear()


def start(words: Sequence[str], log: Path, *, command: str = "train", **environment: str) -> subprocess.Popen[bytes]:
    run, environment = [sys.executable, "-m", "megarl", command, *words], {"MEGARL_TOKEN": TOKEN, **environment}
    with log.open("wb") as out:
        process = subprocess.Popen(run, stdout=out, stderr=out, env={**os.environ, **environment})
    STARTED.append(process)
    return process


def descendants(process: subprocess.Popen[bytes], module: str) -> list[psutil.Process]:
    """Its processes that run this module, the oldest first."""
    found = [child for child in psutil.Process(process.pid).children(recursive=True) if runs(child, module)]
    return sorted((p for p in found if "torch.distributed.run" not in p.cmdline()), key=psutil.Process.create_time)


def test_a_machine_that_goes_ends_the_run_and_all_that_it_started(parts: Path, tmp_path: Path) -> None:
    more = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
    words = settings(parts, tmp_path, "lost", *PPO, "trainer.total_training_steps=200", *more)
    driver = start([*words, "trainer.node_rank=0"], tmp_path / "driver.log")
    other = start([*words, "trainer.node_rank=1"], tmp_path / "other.log", MEGARL_NODE_ADDR="127.0.0.2")
    wait_for_step(tmp_path / "lost", 1, driver)
    started = [child for process in (driver, other) for child in psutil.Process(process.pid).children(recursive=True)]
    other.kill()
    assert driver.wait(timeout=120) == 1
    said = (tmp_path / "driver.log").read_text()
    assert re.search(
        r"the run stopped: group ranks_0: (machine 1 \(host .*\) is lost in|rank 1 \(machine 1, .*\) died in)", said
    )
    assert "Traceback" not in said
    gone, alive = psutil.wait_procs(started, timeout=30)
    assert not alive, f"left behind: {alive}"


@pytest.mark.timeout(900)
def test_a_rank_of_the_other_machine_starts_again_and_spare_ones_take_the_place_of_machines_that_leave_or_are_killed(
    parts: Path, tmp_path: Path
) -> None:
    """Tensor parallelism and two servers over two machines: every step is that of a run on one, to the last bit.

    No port is named: the other machines find the driver by the run's folder.  The servers speak https, as they do by
    themselves at addresses other than loopback; they stay when the rank dies.  A machine that gets SIGTERM leaves
    after a save, comes back and waits, and takes the place of the one that is killed.
    """
    assert main(["train", *settings(parts, tmp_path, "whole", *COMMON)]) == 0
    more = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.spare_nodes=1", "rollout.tls=always"]
    words, run = settings(parts, tmp_path, "spare", *COMMON, *more), tmp_path / "spare"
    driver = start(words, tmp_path / "0.log", JOB_COMPLETION_INDEX="0")
    # Their numbers come from where Kubernetes would tell them.
    others = [
        start(words, tmp_path / f"{k}.log", JOB_COMPLETION_INDEX=str(k), MEGARL_NODE_ADDR=f"127.0.0.{k + 1}")
        for k in (1, 2)
    ]
    wait_for_step(run, 1, driver)
    servers = [descendants(process, "megarl.hf_server.main") for process in (driver, others[0])]
    assert [len(of_one) for of_one in servers] == [1, 1], "a server on each machine"
    (rank,) = descendants(others[0], "megarl.roles.worker")
    rank.kill()
    wait_for_step(run, 3, driver)
    assert "the ranks are started again (1 of 3 without a new step)" in (tmp_path / "0.log").read_text()
    assert (run / "logs/restart_1.txt").stat().st_size > 0
    assert all(server.is_running() for of_one in servers for server in of_one)
    for number, host in enumerate(("127.0.0.1", "127.0.0.2")):
        assert f"https://{host}:" in (run / f"logs/server_{number}.log").read_text()
    left_behind = [*descendants(others[0], "megarl.roles.worker"), *servers[1]]
    others[0].send_signal(signal.SIGTERM)
    assert others[0].wait(timeout=600) == 143, (tmp_path / "1.log").read_text()
    assert "is saved, and a spare machine takes this place" in (tmp_path / "1.log").read_text()
    back = start(words, tmp_path / "back.log", JOB_COMPLETION_INDEX="1", MEGARL_NODE_ADDR="127.0.0.2")
    wait_for_step(run, 5, driver)
    left_behind += [*descendants(others[1], "megarl.roles.worker"), *descendants(others[1], "megarl.hf_server.main")]
    others[1].kill()
    assert driver.wait(timeout=600) == 0, (tmp_path / "0.log").read_text()
    assert back.wait(timeout=60) == 0, (tmp_path / "back.log").read_text()
    gone, alive = psutil.wait_procs(left_behind, timeout=30)
    assert not alive, f"left behind: {alive}"
    said = (tmp_path / "0.log").read_text()
    assert re.search(r"warning: machine 1 \(host .*\) got SIGTERM and leaves the run; step \d is saved", said)
    assert re.search(r"warning: machine 1 \(host .*\) takes the place of host .*, which has left", said)
    assert re.search(r"warning: machine 1 \(host .*\) takes the place of host .*, which is lost", said)
    assert not (run / "logs/restart_3.txt").exists(), "a machine that leaves is no failure"
    assert not (run / "driver_port").exists()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["pushes"] == summary["pushes_verified"]
    for metric in ("critic/score/mean", "actor/pg_loss", "critic/vf_loss", "actor/grad_norm"):
        assert steps(run, metric) == steps(tmp_path / "whole", metric), metric
    assert len(lines(run / "samples.jsonl")) == len(lines(tmp_path / "whole/samples.jsonl"))


GRPO = ["algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1", "data.val_files=[]", "reward.timeout_s=900"]
GATES = """
import time
from pathlib import Path

RUN, GATES = Path({run!r}), Path({gates!r})


def gated(prompt, completion):
    \"\"\"Nothing is scored before a server has joined, and after some steps nothing before it has left.\"\"\"
    visits = RUN / {visits!r}
    done = len(visits.read_text().splitlines()) if visits.exists() else 0
    while not (GATES / ("left" if done >= 3 else "is_in")).exists():
        time.sleep(0.05)
    return sum(map(str.isdigit, completion.text)) / 6
"""


def wait_until(condition: Callable[[], object], log: Path, *processes: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert all(process.poll() is None for process in processes), log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.timeout(1500)
def test_a_server_joins_a_run_writes_samples_for_it_and_leaves_without_a_loss(parts: Path, tmp_path: Path) -> None:
    run, log, guest_log = tmp_path / "joined", tmp_path / "driver.log", tmp_path / "guest.log"
    reward = tmp_path / "gates.py"
    reward.write_text(GATES.format(run=str(run), gates=str(tmp_path), visits=VISITS))
    (port,) = free_ports(["127.0.0.1"])
    more = [f"reward.fn={reward}:gated", "reward.try_rows=0"]  # it waits
    more += [f"rollout.join=127.0.0.1:{port}", "rollout.tls=always", "trainer.total_training_steps=6"]
    words = settings(parts, tmp_path, "joined", *GRPO, *more)
    driver, guest = start(words, log), start(words, guest_log, command="serve")
    served = r"(https://127\.0\.0\.1:\d+) has its first verified weights and serves the run"
    wait_until(lambda: re.search(served, log.read_text()), log, driver, guest)
    found = re.search(served, log.read_text())
    assert found is not None
    (tmp_path / "is_in").touch()
    with closing(ServerClient(found[1], derived(TOKEN, "servers"), timeout_s=60)) as joined:
        wait_for_step(run, 3, driver)
        info = joined.server_info()
    assert info["internal_states"][0]["num_decoded_tokens"] > 0, "it has written samples of this run"
    assert info["weight_version"] == "3"
    guest.send_signal(signal.SIGTERM)
    assert guest.wait(timeout=600) == 0, guest_log.read_text()
    (tmp_path / "left").touch()
    assert driver.wait(timeout=600) == 0, log.read_text()

    said, summary = log.read_text(), json.loads((run / "summary.json").read_text())
    assert f"{found[1]} joins the run" in said and f"{found[1]} leaves the run" in said
    assert summary["pushes"] == summary["pushes_verified"] == 7
    assert summary["servers_died"] == 0
    assert [steps(run, "push/servers")[step] for step in (2, 6)] == [2.0, 1.0]
    assert [steps(run, f"push/servers_{what}")[6] for what in ("joined", "left")] == [1.0, 1.0]
    assert set(steps(run, "rollout/lost").values()) == {0.0}
    visits = [visit for row in lines(run / VISITS) for visit in row["trained"]]
    assert visits == list(range(4 * 6)), "each visit is trained once"
    for sample in lines(run / SAMPLES):
        assert {version for version, _, _ in sample["versions"]} == {sample["step"] - 1}
