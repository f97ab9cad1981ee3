"""Whole small runs whose completions stock SGLang writes; the same with our HF server is in test_ring.py."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from ring_cases import PPO, SHAPE, lines, make_parts, settings, steps, train_in_a_process, wait_for_step
from tiny_models import LACKING

from megarl.cli import main
from megarl.servers.sglang_environment import PYTHON_VARIABLE, sglang_python

pytestmark = [pytest.mark.sglang, pytest.mark.dist]
WIDE = replace(SHAPE, hidden=64, head_dim=16, ffn=128)
GRPO = ["algorithm.adv_estimator=grpo", "actor.megatron.tensor_model_parallel_size=2"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that divide by 64: SGLang's adapters know of no padding."""
    return make_parts(tmp_path_factory.mktemp("parts"), WIDE)


def with_sglang(*more: str, loss: list[str] = GRPO) -> list[str]:
    python = sglang_python(os.environ.get(PYTHON_VARIABLE))
    return [*loss, "rollout.engine=sglang", f"rollout.sglang.python={python}", "rollout.max_total_tokens=8192", *more]


def test_a_killed_server_comes_back_with_the_trainers_weights_slice_by_slice(parts: Path, tmp_path: Path) -> None:
    words = settings(parts, tmp_path, "healed", *with_sglang("rollout.push=sharded", "trainer.total_training_steps=6"))
    process = train_in_a_process(words, tmp_path / "healed.log")
    wait_for_step(tmp_path / "healed", 2, process)
    for child in psutil.Process(process.pid).children(recursive=True):
        if "sglang::scheduler" in child.name() or "sglang::schedul" in child.name():
            os.kill(child.pid, signal.SIGKILL)
    assert process.wait(timeout=300) == 0, (tmp_path / "healed.log").read_text()
    summary = json.loads((tmp_path / "healed" / "summary.json").read_text())
    assert summary["servers_died"] == 1
    assert summary["pushes"] == summary["pushes_verified"] == 7
    assert summary["log_prob_gap_max"] < 1e-4
    assert set(steps(tmp_path / "healed", "push/fallbacks").values()) == {0.0}
    for sample in lines(tmp_path / "healed" / "samples.jsonl"):
        assert sample["versions"] == [[sample["step"] - 1, 0, sample["num_tokens"]]]


def test_adapters_are_pushed_alone(trained: Callable[..., Path]) -> None:
    lora = ["actor.lora.rank=4", "actor.lora.push=adapter", "trainer.total_training_steps=4"]
    run = trained("adapter", *with_sglang(*lora))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["pushes"] == summary["pushes_verified"] == 5
    assert summary["log_prob_gap_max"] < 1e-4, "SGLang's base with the adapter is the trainer's model"
    for sample in lines(run / "samples.jsonl"):
        assert sample["versions"] == [[sample["step"] - 1, 0, sample["num_tokens"]]]


def test_what_top_p_and_top_k_left_is_replayed(trained: Callable[..., Path]) -> None:
    """In pieces, with evaluations that sample from everything."""
    narrow = ["rollout.top_p=0.6", "rollout.top_k=20", "rollout.piece_tokens=4", "trainer.total_training_steps=2"]
    run = trained("narrow", *with_sglang(*narrow))
    summary = json.loads((run / "summary.json").read_text())
    assert 0 < summary["log_prob_gap_max"] < 1e-4
    assert max(abs(kl) for kl in steps(run, "actor/first_ppo_kl").values()) < 1e-8


if "qwen3_next" not in LACKING:

    def test_qwen3_next_learns_from_completions_of_its_own_states(tmp_path: Path) -> None:
        """Actor, critic and reference; each push in slices, of gated delta nets, gated attention and experts."""
        experts = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
        parts = make_parts(tmp_path, WIDE, family="qwen3_next", tied=False, **experts)
        split = [f"{role}.megatron.sequence_parallel=true" for role in ("actor", "critic")]
        words = with_sglang(*split, "rollout.push=sharded", loss=PPO)
        assert main(["train", *settings(parts, tmp_path, "states", *words)]) == 0
        summary = json.loads((tmp_path / "states" / "summary.json").read_text())
        assert summary["pushes"] == summary["pushes_verified"] == 4
        assert summary["log_prob_gap_max"] < 1e-4
        assert set(steps(tmp_path / "states", "push/fallbacks").values()) == {0.0}
        assert min(steps(tmp_path / "states", "actor/grad_norm").values()) > 0
