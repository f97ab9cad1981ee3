"""Old log-probs of the first optimizer step's forward pass, against those of a pass of their own: whole iterations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from old_log_probs_cases import NUM_STEPS, iterate, iterate_offloaded
from spawn import Ranks

from megarl.data.examples.tiny import write_tiny_model

pytestmark = pytest.mark.dist

GRPO = ["algorithm.adv_estimator=grpo"]
PPO = ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3"]
TP, PP = (f"actor.megatron.{name}_model_parallel_size=2" for name in ("tensor", "pipeline"))
CP = "actor.megatron.context_parallel_size=2"
EPOCHS = "actor.ppo_epochs=2"
LOSS = "algorithm.policy_loss_fn="
KL = ["actor.use_kl_loss=true", "actor.kl_loss_type=k2", "actor.kl_importance=true"]
BEHIND = ["rollout.ahead=1", "rollout.max_age=0"]
CASES: dict[str, list[str]] = {
    "grpo dp2": [*GRPO, EPOCHS],
    "grpo tp2": [*GRPO, TP],
    "grpo pp2": [*GRPO, PP, EPOCHS],
    "grpo cp2": [*GRPO, CP, EPOCHS],
    "grpo tp2 of sequences": [*GRPO, TP, "actor.ppo_micro_batch_size_per_gpu=2"],
    "ppo dp2": [*PPO, EPOCHS],
    "ppo pp2": [*PPO, PP],
    "gspo dp2": [*GRPO, f"{LOSS}gspo", EPOCHS],
    "gmpo dp2": [*GRPO, f"{LOSS}gmpo"],
    "cispo tp2": [*GRPO, f"{LOSS}cispo", EPOCHS],
    "dppo dp2": [*GRPO, f"{LOSS}dppo_tv", EPOCHS],
    "sapo dp2": [*GRPO, f"{LOSS}sapo", EPOCHS],
    "dual clip dp2": [*GRPO, "actor.clip_ratio_c=1.5", "actor.entropy_coeff=0.1", EPOCHS],
    "kl loss dp2": [*GRPO, *KL, EPOCHS],
    "one iteration ahead dp2": [*GRPO, *BEHIND, EPOCHS],
    "bypass dp2": [*GRPO, *BEHIND, "algorithm.rollout_correction.bypass=true", EPOCHS],
}
MINIS = ["actor.ppo_mini_batch_size=1", "actor.ppo_micro_batch_size_per_gpu=1", EPOCHS]
CASES_OF_MINIS = {
    "grpo dp2": [*GRPO, *MINIS],
    "ppo tp2": [*PPO, TP, *MINIS],
    "gspo pp2": [*GRPO, f"{LOSS}gspo", PP, *MINIS],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("model")
    return write_tiny_model(where / "tiny", seed=1, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48)


def both(ranks: Ranks, folder: Path, words: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Each rank's iterations, with a pass of their own and without."""
    always, never = ([*common(words), f"actor.old_log_prob_freq={every}"] for every in (1, 0))
    return ranks.run(iterate, str(folder), always), ranks.run(iterate, str(folder), never)


def common(words: list[str]) -> list[str]:
    packed = [] if "micro_batch" in str(words) else ["actor.ppo_max_token_len_per_gpu=45"]
    found = ["data.max_prompt_length=16", "data.max_response_length=16", "data.train_batch_size=3", "rollout.n=3"]
    return [*found, "trainer.device=cpu", "trainer.n_gpus_per_node=2", "actor.optim.lr=1e-3", *packed, *words]


def compare(own: dict[str, Any], first: dict[str, Any], *, share: float = 0, is_compared: bool = False) -> None:
    """To the bit."""
    assert all("old_log_prob" in stages for stages in own["stages"])
    for step in range(NUM_STEPS):
        assert torch.equal(own["old"][step], first["old"][step])
        measured, other = dict(own["stats"][step]), dict(first["stats"][step])
        assert measured.pop("perf/old_log_prob_share") == 1
        assert other.pop("perf/old_log_prob_share") == pytest.approx(share)
        if not is_compared:
            assert measured.pop("actor/first_ppo_kl") == 0
        assert measured == other
    assert all(torch.equal(a, b) for a, b in zip(own["weights"], first["weights"], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_an_iteration_without_the_pass_is_the_same(two_ranks: Ranks, folder: Path, case: str) -> None:
    for own, first in zip(*both(two_ranks, folder, CASES[case]), strict=True):
        assert not any("old_log_prob" in stages for stages in first["stages"])
        compare(own, first, is_compared="bypass" in case)


@pytest.mark.parametrize("case", CASES_OF_MINIS)
def test_with_several_mini_batches_a_pass_over_all_but_the_first_does(
    two_ranks: Ranks, folder: Path, case: str
) -> None:
    """Each sequence is a micro-batch of its own: else the passes pack the sequences otherwise, and round otherwise."""
    for own, first in zip(*both(two_ranks, folder, CASES_OF_MINIS[case]), strict=True):
        assert all("old_log_prob" in stages for stages in first["stages"])
        compare(own, first, share=2 / 3)


@pytest.mark.parametrize("words", [[*PPO, *MINIS], [*GRPO, TP, EPOCHS, "model.dtype=bfloat16"]], ids=" ".join)
def test_roles_that_are_offloaded_learn_the_same(two_ranks: Ranks, folder: Path, words: list[str]) -> None:
    """Whole updates of the policy and the critic, whose moments come while they compute."""
    stay = two_ranks.run(iterate, str(folder), common(words))
    for own, other in zip(stay, two_ranks.run(iterate_offloaded, str(folder), common(words)), strict=True):
        assert own["stats"] == other["stats"]
        assert all(torch.equal(a, b) for a, b in zip(own["weights"], other["weights"], strict=True))
