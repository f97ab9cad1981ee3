"""A small run as its user starts it by hand: on this machine, and on two, each a loopback address of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ring_cases import PPO, make_parts, settings

from megarl.servers.server_process import free_ports

pytestmark = [pytest.mark.dist, pytest.mark.full]
LAUNCH = Path(__file__).parents[2] / "launch"
LIMIT_S = 800


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


def start(script: str, words: list[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    python = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{python}:{os.environ['PATH']}", "PYTHONPATH": str(LAUNCH.parent), **environment}
    with log.open("wb") as out:
        command = ["bash", str(LAUNCH / script), *words]
        return subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=log.parent)


def check(run: Path) -> None:
    """Three steps, and a verified push before them and after each."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["pushes"] == summary["pushes_verified"] == 4


def test_a_run_on_this_machine(parts: Path, tmp_path: Path) -> None:
    run = start("local.sh", settings(parts, tmp_path, "local", *PPO), tmp_path / "log")
    assert run.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    check(tmp_path / "local")


def test_the_same_words_on_two_machines(parts: Path, tmp_path: Path) -> None:
    """But for their number; the token is in a file that only its owner reads."""
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("the secret of these tests")
    (driver_port,) = free_ports(["127.0.0.1"])
    more = ["trainer.n_gpus_per_node=1", f"trainer.master_port={driver_port}"]
    words = settings(parts, tmp_path, "two", *PPO, *more)
    runs = [
        start(
            "node.sh",
            ["2", str(node), "127.0.0.1", *words],
            tmp_path / f"log_{node}",
            MEGARL_TOKEN_FILE=str(token),
            MEGARL_NODE_ADDR=f"127.0.0.{node + 1}",
        )
        for node in range(2)
    ]
    said = [tmp_path / f"log_{node}" for node in range(2)]
    try:
        deadline = time.monotonic() + LIMIT_S
        codes = [run.wait(max(0.0, deadline - time.monotonic())) for run in runs]
        assert codes == [0, 0], "\n".join(log.read_text() for log in said)
    finally:
        for run in runs:
            run.kill()
    check(tmp_path / "two")
    assert "machine 1 of 2, at the orders of 127.0.0.1" in said[1].read_text()
