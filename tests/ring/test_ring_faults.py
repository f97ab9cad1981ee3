"""Whole small runs in which something is killed or fails: what is repaired, what stops the run, and what is left."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from ring_cases import PPO, lines, make_parts, settings, steps, train_in_a_process, wait_for_step
from safetensors.torch import load_file, save_file
from saved_runs import flip

from megarl.cli import main
from megarl.doctor.run_folder import explain
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import Servers, State, Supervision

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


@pytest.mark.slow
def test_a_run_whose_newest_save_is_damaged_goes_on_from_the_one_before(
    parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One bit of a tensor: the ranks find it, start again, and repeat the steps in between to the last bit."""
    words = settings(parts, tmp_path, "flipped", *PPO, "trainer.save_freq=1", "trainer.async_save=false")
    assert main(["train", *words, "trainer.total_training_steps=3"]) == 0
    before = steps(tmp_path / "flipped", "actor/grad_norm")
    folder = tmp_path / "flipped" / "checkpoints" / "step_00000003"
    file = max((folder / "actor").glob("*.safetensors"))
    flip(file, file.stat().st_size - 1, 6)
    longer = [*words, "trainer.total_training_steps=4"]
    capfd.readouterr()
    assert main(["train", *longer, f"trainer.resume_mode={folder}"]) == 2
    assert f"error: {file} is damaged: its SHA-256 is not that of what was written" in capfd.readouterr().err
    assert main(["train", *longer]) == 0
    said = capfd.readouterr().err
    assert f"warning: step_00000003 is passed over: {file} is damaged" in said
    assert "going on from step 2 (" in said
    after = steps(tmp_path / "flipped", "actor/grad_norm")
    assert {step: after[step] for step in before} == before
    assert 4 in after


@pytest.mark.slow
def test_a_disk_that_is_full_ends_a_run_in_a_sentence(parts: Path, tmp_path: Path) -> None:
    """The driver may write to no file from its second step on, as on a full disk."""
    run = tmp_path / "full"
    words = settings(parts, tmp_path, "full", *PPO, "trainer.total_training_steps=100000")
    command = [sys.executable, "-m", "megarl", "train", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        wait_for_step(run, 2, process)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
        assert process.stderr is not None
        said = process.stderr.read().decode()
        assert process.wait(timeout=300) == 1
    assert "\nthe run stopped: [Errno 27] File too large" in f"\n{said}"
    assert f"{run}/logs/failure.txt could not be written (File too large); " in said
    assert "Traceback" not in said


def kill_a_server(driver: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(driver.pid).children(recursive=True)
    os.kill(next(c for c in children if "megarl.hf_server.main" in c.cmdline()).pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_server_that_dies_comes_back_with_the_trainers_weights(parts: Path, tmp_path: Path) -> None:
    """The only one: the trainer waits for it."""
    words = settings(parts, tmp_path, "healed", *PPO, "trainer.total_training_steps=8")
    process = train_in_a_process(words, tmp_path / "healed.log")
    wait_for_step(tmp_path / "healed", 2, process)
    kill_a_server(process)
    assert process.wait(timeout=800) == 0, (tmp_path / "healed.log").read_text()
    summary = json.loads((tmp_path / "healed" / "summary.json").read_text())
    assert summary["servers_died"] == 1
    assert summary["pushes"] == summary["pushes_verified"] == 9
    assert_fresh(tmp_path / "healed", ahead=0)


@pytest.mark.slow
def test_of_two_servers_the_trainer_goes_on_with_one_until_the_other_is_back(parts: Path, tmp_path: Path) -> None:
    """However many steps that takes: then the run is stopped."""
    more = ["rollout.num_servers=2", "rollout.ahead=1", "trainer.total_training_steps=100000"]
    run = tmp_path / "healed"
    process = train_in_a_process(settings(parts, tmp_path, "healed", *PPO, *more), tmp_path / "healed.log")
    wait_for_step(run, 2, process)
    kill_a_server(process)
    deadline = time.monotonic() + 800
    while not any(
        row.get("push/servers_died") == 1 and row["push/servers"] == 2 for row in lines(run / "metrics.jsonl")
    ):
        assert process.poll() is None, (tmp_path / "healed.log").read_text()
        assert time.monotonic() < deadline, "it does not come back"
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=300)
    assert_fresh(run, ahead=1)


def assert_fresh(run: Path, *, ahead: int) -> None:
    """No sample was generated by other weights than those of its step, or of so many steps before."""
    for sample in lines(run / "samples.jsonl"):
        versions = [version for version, _, _ in sample["versions"]]
        assert all(sample["step"] - 1 - ahead <= v <= sample["step"] - 1 for v in versions)


@pytest.mark.long
def test_a_server_that_may_not_come_back_stops_the_run_with_its_name_and_log(parts: Path, tmp_path: Path) -> None:
    words = settings(parts, tmp_path, "orphan", *PPO, "trainer.total_training_steps=200", "rollout.max_restarts=0")
    process = train_in_a_process(words, tmp_path / "orphan.log")
    wait_for_step(tmp_path / "orphan", 2, process)
    kill_a_server(process)
    assert process.wait(timeout=600) == 1
    said = (tmp_path / "orphan.log").read_text()
    assert "the run stopped: no server is left" in said
    assert "server 0" in said
    assert "Traceback" not in said
    assert (tmp_path / "orphan" / "logs" / "failure.txt").stat().st_size > 0
    found = explain(tmp_path / "orphan")
    # Who notices first, the supervisor or a call that fails, is chance; what it says differs.
    assert found.state == "failed"
    assert re.match(r"the servers ended: no server is left; .*server 0", found.cause), found.cause


@pytest.mark.long
def test_ranks_that_start_again_go_on_without_a_server_that_is_away_until_it_is_back(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a machine is lost, with a rank and a server of another program on it."""
    token, run, log = "the key of these servers", tmp_path / "away", tmp_path / "away.log"
    monkeypatch.setenv("MEGARL_SERVER_TOKEN", token)
    launch = EngineLaunch("hf", str(parts / "model"), dtype="float32")
    with Servers([launch] * 2, token, tmp_path / "servers", Supervision(rest_s=0)) as servers:
        servers.start()
        more = [f"rollout.urls=[{','.join(servers.urls)}]", "trainer.save_freq=1", "trainer.n_gpus_per_node=1"]
        more += ["algorithm.adv_estimator=grpo", "data.val_files=[]", "trainer.total_training_steps=100000"]
        process = train_in_a_process(settings(parts, tmp_path, "away", *more), log)
        wait_for_step(run, 2, process)
        children = psutil.Process(process.pid).children(recursive=True)
        rank = next(child for child in children if "megarl.roles.worker" in child.cmdline())
        os.kill(servers.pids[1], signal.SIGKILL)
        rank.kill()
        for number in (1, 2):  # servers during a step: without the one that is away, and with both
            wait_for_servers(run, number, process, log)
            while State.RESTING not in servers.states and number == 1:
                servers.poll(starts=False)
            servers.poll()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=300)
    said = log.read_text()
    assert said.count("the ranks are started again (1 of 3 without a new step)") == 1
    assert f"{servers.urls[1]} is out of service: " in said
    assert_fresh(run, ahead=0)


def wait_for_servers(run: Path, number: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the run's last step was made with so many servers."""
    deadline = time.monotonic() + 800
    while steps(run, "push/servers").popitem()[1] != number:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, "it does not go on"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_reward_that_always_raises_stops_the_start_or_is_0_or_stops_the_run(
    parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fn = tmp_path / "mine.py"
    fn.write_text("def score(prompt, completion):\n    raise KeyError('no such unit')\n")
    common = ["algorithm.adv_estimator=grpo", f"reward.fn={fn}:score", "trainer.n_gpus_per_node=1"]
    assert main(["train", *settings(parts, tmp_path, "tried", *common)]) == 2
    said = capfd.readouterr().err
    assert f"reward.fn={fn}:score: tried on {parts}/data/train.jsonl:1 with the answer" in said
    assert not (tmp_path / "tried" / "metrics.jsonl").exists()
    common += ["reward.try_rows=0"]
    zero = [*common, "reward.on_error=zero", "trainer.total_training_steps=1"]
    assert main(["train", *settings(parts, tmp_path, "zero", *zero)]) == 0
    assert set(steps(tmp_path / "zero", "critic/score/mean").values()) == {0.0}
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "no such unit" in line]
    assert line.startswith(f"warning: reward {fn}:score, sample ")
    assert line.endswith(f"; counted as 0; more errors are in {tmp_path}/zero/logs/collector.log")
    assert main(["train", *settings(parts, tmp_path, "stop", *common, "reward.on_error=stop")]) == 1
    said = capfd.readouterr().err
    assert "no such unit" in said
    assert "sample" in said
    found = explain(tmp_path / "stop")
    assert found.cause.startswith("a reward failed: ")
    assert "no such unit" in found.cause
    assert main(["train", *settings(parts, tmp_path, "unscored", *common, "data.val_files=[]")]) == 1
    said = capfd.readouterr().err
    assert "all 4 prompts of an iteration were lost; the first: 4 of 4 completions could not be scored" in said
    assert "no such unit" in said


@pytest.mark.slow
def test_a_model_with_weights_that_are_not_finite_is_one_sentence_before_the_first_step(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, name = shutil.copytree(parts / "model", tmp_path / "model"), "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(model / "model.safetensors")
    tensors[name][-1, -1] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert main(["train", *settings(parts, tmp_path, "nan", *PPO, f"model.path={model}")]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("rollout.engine=auto")]
    assert said == [f"error: {model}/model.safetensors: the tensor {name} holds nan; expected finite numbers"]
