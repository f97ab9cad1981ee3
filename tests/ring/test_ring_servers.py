"""A whole small run that a server joins and leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from ring_cases import lines, make_parts, settings, steps, wait_for_step

from megarl.metrics.report import SAMPLES, VISITS
from megarl.network.auth import derived
from megarl.rollout.client import ServerClient
from megarl.servers.server_process import free_ports

pytestmark = [pytest.mark.dist, pytest.mark.slow]
TOKEN = "the secret of these tests"
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


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


def start(command: str, words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "megarl", command, *words],
            stdout=out,
            stderr=out,
            env={**os.environ, "MEGARL_TOKEN": TOKEN},
        )


def wait_until(condition: Callable[[], object], log: Path, *processes: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert all(process.poll() is None for process in processes), log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def server_of(url: str) -> ServerClient:
    return ServerClient(url, derived(TOKEN, "servers"), timeout_s=60)


@pytest.mark.timeout(1500)
def test_a_server_joins_a_run_writes_samples_for_it_and_leaves_without_a_loss(parts: Path, tmp_path: Path) -> None:
    run, log, guest_log = tmp_path / "joined", tmp_path / "driver.log", tmp_path / "guest.log"
    reward = tmp_path / "gates.py"
    reward.write_text(GATES.format(run=str(run), gates=str(tmp_path), visits=VISITS))
    (port,) = free_ports(["127.0.0.1"])
    more = [
        f"reward.fn={reward}:gated",
        "reward.try_rows=0",  # it waits
        f"rollout.join=127.0.0.1:{port}",
        "rollout.tls=always",
        "trainer.total_training_steps=6",
    ]
    words = settings(parts, tmp_path, "joined", *GRPO, *more)
    driver, guest = start("train", words, log), start("serve", words, guest_log)
    served = r"(https://127\.0\.0\.1:\d+) has its first verified weights and serves the run"
    wait_until(lambda: re.search(served, log.read_text()), log, driver, guest)
    found = re.search(served, log.read_text())
    assert found is not None
    (tmp_path / "is_in").touch()
    with closing(server_of(found[1])) as joined:
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
