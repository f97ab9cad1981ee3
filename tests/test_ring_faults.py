"""Whole small runs in which something is killed or fails: what is repaired, what stops the run, and what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from ring_cases import PPO, lines, make_parts, settings, steps, train_in_a_process, wait_for_step

from megarl.cli import main

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(parts: Path, tmp_path: Path) -> None:
    """Killed after a save and some steps behind it: the resumed run repeats those steps to the last bit.

    Dynamic sampling takes as many prompts as it needs, so the place where the next step begins is not a multiple.
    """
    more = [*PPO, "trainer.total_training_steps=5", "trainer.save_freq=2", "trainer.test_freq=-1"]
    more += ["algorithm.filter_groups.enable=true"]
    whole = settings(parts, tmp_path, "whole", *more)
    assert main(["train", *whole]) == 0

    words = settings(parts, tmp_path, "killed", *more)
    process = train_in_a_process(words, tmp_path / "first.log")
    wait_for_step(tmp_path / "killed", 3, process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 4, "an agent, two ranks, a server, a collector"
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, f"children outlived the driver: {alive}"

    assert main(["train", *words]) == 0
    assert max(steps(tmp_path / "whole", "rollout/gen_batches").values()) > 1
    same = "critic/score/mean actor/pg_loss critic/vf_loss actor/grad_norm actor/lr rollout/gen_batches"
    for metric in same.split():
        assert steps(tmp_path / "killed", metric) == steps(tmp_path / "whole", metric), metric
    assert len(lines(tmp_path / "killed" / "metrics.jsonl")) == len(lines(tmp_path / "whole" / "metrics.jsonl"))


def kill_a_server(driver: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(driver.pid).children()
    os.kill(next(c for c in children if "megarl.rollout.cpu" in c.cmdline()).pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("num_servers", "num_steps", "more"),
    [
        (1, 8, []),
        # of two the trainer does not wait for one
        pytest.param(2, 50, ["rollout.num_servers=2", "rollout.ahead=1"], marks=pytest.mark.slow),
    ],
)
def test_a_server_that_dies_comes_back_with_the_trainers_weights(
    parts: Path, tmp_path: Path, num_servers: int, num_steps: int, more: list[str]
) -> None:
    words = settings(parts, tmp_path, "healed", *PPO, f"trainer.total_training_steps={num_steps}", *more)
    process = train_in_a_process(words, tmp_path / "healed.log")
    wait_for_step(tmp_path / "healed", 2, process)
    kill_a_server(process)
    assert process.wait(timeout=200) == 0, (tmp_path / "healed.log").read_text()
    summary = json.loads((tmp_path / "healed" / "summary.json").read_text())
    assert summary["servers_died"] == 1
    assert summary["pushes"] == summary["pushes_verified"] == num_steps + 1
    assert steps(tmp_path / "healed", "push/servers")[num_steps] == num_servers, "it works again"
    ahead = num_servers - 1
    for sample in lines(tmp_path / "healed" / "samples.jsonl"):
        versions = [version for version, _, _ in sample["versions"]]
        assert all(sample["step"] - 1 - ahead <= v <= sample["step"] - 1 for v in versions), "stale weights wrote this"


@pytest.mark.slow
def test_a_server_that_may_not_come_back_stops_the_run_with_its_name_and_log(parts: Path, tmp_path: Path) -> None:
    words = settings(parts, tmp_path, "orphan", *PPO, "trainer.total_training_steps=200", "rollout.max_restarts=0")
    process = train_in_a_process(words, tmp_path / "orphan.log")
    wait_for_step(tmp_path / "orphan", 2, process)
    kill_a_server(process)
    assert process.wait(timeout=90) == 1
    said = (tmp_path / "orphan.log").read_text()
    assert "the run stopped: no server is left" in said
    assert "server 0" in said
    assert "Traceback" not in said
    assert (tmp_path / "orphan" / "logs" / "failure.txt").stat().st_size > 0


@pytest.mark.slow
def test_a_reward_that_raises_costs_its_sample_or_stops_the_run(
    parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fn = tmp_path / "mine.py"
    fn.write_text("def score(prompt, completion):\n    raise KeyError('no such unit')\n")
    common = ["algorithm.adv_estimator=grpo", f"reward.fn={fn}:score", "trainer.n_gpus_per_node=1"]
    assert main(["train", *settings(parts, tmp_path, "zero", *common, "trainer.total_training_steps=1")]) == 0
    assert set(steps(tmp_path / "zero", "critic/score/mean").values()) == {0.0}
    assert main(["train", *settings(parts, tmp_path, "stop", *common, "reward.on_error=stop")]) == 1
    said = capfd.readouterr().err
    assert "no such unit" in said
    assert "sample" in said
