"""The whole ring: driver, Megatron ranks, a server over HTTP, rewards, pushes; small, and nothing replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from ring_cases import lines, make_parts, settings, steps, train_in_a_process, wait_for_step
from transformers import AutoModelForCausalLM

from megarl.cli import main

pytestmark = pytest.mark.dist
PPO = ["actor.megatron.tensor_model_parallel_size=2", "actor.use_kl_loss=true", "actor.ppo_mini_batch_size=2"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def ppo(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Actor, critic and reference on two tensor-parallel ranks; the KL in the reward too, steered."""
    runs = tmp_path_factory.mktemp("runs")
    kl = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100"]
    more = ["trainer.check_export=true", "trainer.logger=[console,jsonl,tensorboard]", "rollout.check_every=2"]
    words = settings(parts, runs, "ppo", *PPO, *kl, *more)
    assert main(["train", *words]) == 0
    return runs / "ppo"


def test_every_push_is_verified_and_every_sample_knows_its_weights(ppo: Path) -> None:
    summary = json.loads((ppo / "summary.json").read_text())
    assert summary["pushes_verified"] == 4, "before the first step and after each of three"
    assert steps(ppo, "push/compared") == {1: 1.0, 2: 0.0, 3: 1.0}, "every second is read from an exported folder too"
    for sample in lines(ppo / "samples.jsonl"):
        assert sample["versions"] == [[sample["step"] - 1, 0, sample["num_tokens"]]]


def test_server_and_trainer_agree_on_the_log_probs(ppo: Path) -> None:
    # float32 on both sides, other kernels and another order of sums: 1e-4 is the contract.
    assert 0 < max(steps(ppo, "rollout_corr/log_prob_gap_max").values()) < 1e-4


def test_nothing_has_moved_at_the_first_optimizer_step(ppo: Path) -> None:
    # The same weights, perhaps packed otherwise: what is left is a mean of float32 roundings, which cancel.
    assert max(abs(kl) for kl in steps(ppo, "actor/first_ppo_kl").values()) < 1e-8
    assert abs(steps(ppo, "actor/reward_kl_penalty")[1]) < 1e-8, "the reference is the policy at the start"


def test_the_run_folder_explains_itself(ppo: Path) -> None:
    page = (ppo / "README.md").read_text()
    for name in ("summary.json", "learning_curve.png", "answers.md", "config.yaml", "metrics.jsonl", "samples.jsonl"):
        assert (ppo / name).stat().st_size > 0
        assert name in page
    assert list((ppo / "tensorboard").iterdir())
    summary = json.loads((ppo / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "wall_s", "steps", "log_prob_gap_max"} <= set(summary)


def test_the_exported_model_scores_the_same_in_transformers(ppo: Path) -> None:
    summary = json.loads((ppo / "summary.json").read_text())
    assert summary["accuracy_transformers"] == summary["accuracy_after"]


def test_the_kl_controller_moves_and_statistics_have_the_fields_names(ppo: Path) -> None:
    coefficients = steps(ppo, "actor/reward_kl_penalty_coeff")
    assert coefficients[1] == pytest.approx(0.001)
    assert coefficients[2] < coefficients[1], "the KL is far below its target"
    last = lines(ppo / "metrics.jsonl")[-2]
    wanted = """actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy actor/kl_loss
        actor/grad_norm actor/lr actor/ratio_mean actor/ratio_std actor/ratio_min actor/ratio_max critic/vf_loss
        critic/vf_clipfrac critic/vf_explained_var critic/grad_norm critic/advantages/mean critic/returns/mean
        critic/score/mean response_length/mean prompt_length/mean rollout_corr/log_prob_gap_max timing_s/gen
        timing_s/update_actor timing_s/update_weights timing_s/step perf/throughput perf/unaccounted"""
    assert not set(wanted.split()) - set(last)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(parts: Path, tmp_path: Path) -> None:
    """Killed after a save and some steps behind it: the resumed run repeats those steps to the last bit."""
    more = [*PPO, "trainer.total_training_steps=5", "trainer.save_freq=2", "trainer.test_freq=-1"]
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
    for metric in ("critic/score/mean", "actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "actor/lr"):
        assert steps(tmp_path / "killed", metric) == steps(tmp_path / "whole", metric), metric
    assert len(lines(tmp_path / "killed" / "metrics.jsonl")) == len(lines(tmp_path / "whole" / "metrics.jsonl"))


def test_a_critic_may_have_a_layout_of_its_own(parts: Path, tmp_path: Path) -> None:
    """Two groups at once: the actor tensor parallel, the critic data parallel; ahead=1 and GRPO-free PPO."""
    more = [PPO[0], "critic.megatron.tensor_model_parallel_size=1", "rollout.ahead=1", "rollout.num_servers=2"]
    assert main(["train", *settings(parts, tmp_path, "two", *more)]) == 0
    run = tmp_path / "two"
    assert (run / "logs" / "ranks_0").is_dir()
    assert (run / "logs" / "ranks_1").is_dir()
    lag = steps(run, "off_policy/version_lag/max")
    assert lag[1] == 0
    assert 0 < max(lag.values()) <= 1, "one iteration ahead, never more"


def test_grpo_on_a_pipeline_needs_no_critic(parts: Path, tmp_path: Path) -> None:
    more = [
        "algorithm.adv_estimator=grpo",
        "actor.megatron.pipeline_model_parallel_size=2",
        "actor.ppo_max_token_len_per_gpu=40",
    ]
    assert main(["train", *settings(parts, tmp_path, "grpo", *more)]) == 0
    assert len(steps(tmp_path / "grpo", "actor/pg_loss")) == 3
    assert not steps(tmp_path / "grpo", "critic/vf_loss")


def kill_a_server(driver: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(driver.pid).children()
    os.kill(next(c for c in children if "megarl.rollout.cpu" in c.cmdline()).pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("num_servers", "num_steps", "more"),
    [(1, 8, []), (2, 50, ["rollout.num_servers=2", "rollout.ahead=1"])],  # of two the trainer does not wait for one
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


def test_adapters_are_trained_alone_and_pushed_merged(parts: Path, tmp_path: Path) -> None:
    more = [*PPO, "actor.lora.rank=4", "actor.lora.alpha=8", "trainer.check_export=true"]
    assert main(["train", *settings(parts, tmp_path, "lora", *more)]) == 0
    run = tmp_path / "lora"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["pushes"] == summary["pushes_verified"] == 4
    assert summary["accuracy_transformers"] == summary["accuracy_after"], "hf/ is the merged model"
    base = AutoModelForCausalLM.from_pretrained(parts / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run / "adapter").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32).state_dict()
    # One multiplication and addition in another order: float32's last bits.
    for name, tensor in adapted.state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6)


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
