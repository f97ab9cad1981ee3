"""Whole small runs over two machines, each a process with a loopback address of its own; and ranks started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from ring_cases import PPO, lines, make_parts, settings, steps, wait_for_step

from megarl.cli import main

pytestmark = pytest.mark.dist
COMMON = [*PPO, "rollout.num_servers=2", "trainer.total_training_steps=4", "trainer.save_freq=2"]
METRICS = ("critic/score/mean", "actor/pg_loss", "critic/vf_loss", "actor/grad_norm")
STARTED: list[subprocess.Popen[bytes]] = []
TOKEN = {"MEGARL_TOKEN": "the secret of these tests"}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def whole(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one machine."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["train", *settings(parts, folder, "whole", *COMMON)]) == 0
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Also after a test that fails: an agent would wait half an hour for a driver."""
    yield
    for process in STARTED:
        process.kill()
        process.wait()
    STARTED.clear()


def start(words: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "megarl", "train", *words]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **TOKEN, **environment})
    STARTED.append(process)
    return process


def descendants(process: subprocess.Popen[bytes], module: str) -> list[psutil.Process]:
    """Its processes that run this module, the oldest first."""
    found = [p for p in psutil.Process(process.pid).children(recursive=True) if f"-m {module}" in " ".join(p.cmdline())]
    return sorted((p for p in found if "torch.distributed.run" not in p.cmdline()), key=psutil.Process.create_time)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_rank_of_the_other_machine_dies_and_the_run_goes_on_while_servers_stay(
    parts: Path, whole: Path, tmp_path: Path
) -> None:
    """Tensor parallelism and two servers over two machines: every step is that of a run on one, to the last bit.

    The servers speak https, as they do by themselves at addresses other than loopback.
    """
    more = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "rollout.tls=always"]
    words = settings(parts, tmp_path, "two", *COMMON, *more)
    driver = start(words, tmp_path / "driver.log")
    # its number comes from where Kubernetes would tell it
    other = start(words, tmp_path / "other.log", JOB_COMPLETION_INDEX="1", MEGARL_NODE_ADDR="127.0.0.2")
    wait_for_step(tmp_path / "two", 3, driver)
    servers = [descendants(process, "megarl.hf_server.main") for process in (driver, other)]
    assert [len(of_one) for of_one in servers] == [1, 1], "a server on each machine"
    (rank,) = descendants(other, "megarl.roles.worker")
    os.kill(rank.pid, signal.SIGKILL)
    while driver.poll() is None and driver.returncode is None:
        assert all(server.is_running() for of_one in servers for server in of_one) or finished(tmp_path / "two")
        try:
            driver.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
    said = (tmp_path / "driver.log").read_text()
    assert driver.returncode == 0, said
    assert other.wait(timeout=60) == 0, (tmp_path / "other.log").read_text()
    assert "the ranks are started again (1 of 3 without a new step)" in said
    assert (tmp_path / "two/logs/restart_1.txt").stat().st_size > 0
    summary = json.loads((tmp_path / "two/summary.json").read_text())
    assert summary["servers_died"] == 0
    assert summary["pushes"] == summary["pushes_verified"]
    for number, host in enumerate(("127.0.0.1", "127.0.0.2")):
        assert f"https://{host}:" in (tmp_path / f"two/logs/server_{number}.log").read_text()
    for metric in METRICS:
        assert steps(tmp_path / "two", metric) == steps(whole / "whole", metric), metric
    assert len(lines(tmp_path / "two/samples.jsonl")) == len(lines(whole / "whole/samples.jsonl"))


def finished(run: Path) -> bool:
    return (run / "summary.json").exists()


@pytest.mark.slow
def test_a_machine_that_goes_ends_the_run_and_all_that_it_started(parts: Path, tmp_path: Path) -> None:
    more = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
    words = settings(parts, tmp_path, "lost", *PPO, "trainer.total_training_steps=200", *more)
    driver = start(words, tmp_path / "driver.log")
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_spare_machine_takes_the_place_of_one_that_is_killed_with_its_rank_and_its_server(
    parts: Path, whole: Path, tmp_path: Path
) -> None:
    """No port is named: the other machines find the driver by the run's folder.  All steps are those of one machine."""
    more = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.spare_nodes=1"]
    words = settings(parts, tmp_path, "spare", *COMMON, *more)
    driver = start(words, tmp_path / "driver.log")
    others = [
        start([*words, f"trainer.node_rank={k}"], tmp_path / f"{k}.log", MEGARL_NODE_ADDR=f"127.0.0.{k + 1}")
        for k in (1, 2)
    ]
    wait_for_step(tmp_path / "spare", 3, driver)
    (rank,), (server,) = (descendants(others[0], f"megarl.{module}") for module in ("roles.worker", "hf_server.main"))
    others[0].kill()
    said = ended(driver, tmp_path / "driver.log")
    assert others[1].wait(timeout=60) == 0, (tmp_path / "2.log").read_text()
    gone, alive = psutil.wait_procs([rank, server], timeout=30)
    assert not alive, f"left behind: {alive}"
    assert re.search(r"warning: machine 1 \(host .*\) takes the place of host .*, which is lost", said)
    assert not (tmp_path / "spare/driver_port").exists()
    for metric in METRICS:
        assert steps(tmp_path / "spare", metric) == steps(whole / "whole", metric), metric


def ended(process: subprocess.Popen[bytes], log: Path) -> str:
    """The log of a process that has ended well."""
    assert process.wait(timeout=600) == 0, log.read_text()
    return log.read_text()
