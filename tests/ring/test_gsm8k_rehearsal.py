"""The recipe of the public reference run: its numbers, and the same recipe through the whole ring on a tiny model."""

import json
from pathlib import Path

import pytest
from gsm8k_shaped import write_rows
from readme_blocks import BOOK, first_cells
from ring_cases import lines, steps

from megarl.cli import main
from megarl.config import load_config
from megarl.config.validate.values import value_of
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.rewards.functions.gsm8k import gsm8k
from megarl.samples.sample import Completion, Prompt, VersionSpan

pytestmark = pytest.mark.dist
RECIPE = "recipe=gsm8k_qwen2_5_0_5b_1gpu"
PUBLISHED = {
    "algorithm.adv_estimator": "gae",
    "algorithm.policy_loss_fn": "ppo",
    "data.train_batch_size": 256,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 512,
    "actor.ppo_mini_batch_size": 64,
    "actor.ppo_micro_batch_size_per_gpu": 2,
    "actor.ppo_max_token_len_per_gpu": None,
    "critic.ppo_mini_batch_size": 64,
    "critic.ppo_micro_batch_size_per_gpu": 2,
    "critic.model.path": "Qwen/Qwen2.5-0.5B-Instruct",
    "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
    "rollout.tensor_model_parallel_size": 1,
    "trainer.n_gpus_per_node": 1,
    "reward.fn": ["gsm8k_strict"],
}


def test_the_recipe_carries_the_published_numbers() -> None:
    config, warnings = load_config([RECIPE])
    assert not warnings
    assert {key: value_of(config, key) for key in PUBLISHED} == PUBLISHED
    assert config.uses_critic
    assert config.uses_reference


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of four prompts, each with the recipe's four optimizer steps, on one CPU rank."""
    folder = tmp_path_factory.mktemp("gsm8k")
    write_tiny_model(
        folder / "model", TinySizes(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64), family="qwen2"
    )
    write_rows(folder / "train.jsonl", range(1, 5))
    write_rows(folder / "test.jsonl", range(5, 7))
    # The preset's sizes are those of the published model; a random model says 7 now and then, and never behind a mark.
    tiny = f"""data.train_files=[{folder}/train.jsonl] data.val_files=[{folder}/test.jsonl] data.train_batch_size=4
        data.max_prompt_length=256 data.max_response_length=32 model.path={folder}/model model.config={{}}
        model.dtype=float32 actor.ppo_mini_batch_size=1 rollout.n=8 reward.fn=gsm8k trainer.device=cpu
        trainer.total_training_steps=2 trainer.save_freq=2 trainer.default_local_dir={folder}/runs"""
    assert main(["train", RECIPE, *tiny.split()]) == 0
    return folder / "runs" / "gsm8k_qwen2_5_0_5b_1gpu"


@pytest.mark.full
def test_questions_are_scored_by_the_number_after_the_mark_and_actor_and_critic_learn(run: Path) -> None:
    samples = lines(run / "samples.jsonl")
    assert len(samples) == 2 * 4 * 8
    for sample in samples:
        assert sample["prompt"].startswith("user: Ann has ")
        assert sample["ground_truth"] == "7"
        prompt = Prompt(sample["uid"], [], sample["prompt"], "7")
        completion = Completion([], [], sample["finish_reason"], (VersionSpan(0, 0, 0),), sample["completion"])
        assert sample["reward"] == gsm8k(prompt, completion)
    assert 0 < sum(sample["reward"] for sample in samples) < len(samples)
    for metric in ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "actor/reward_kl_penalty"):
        assert sorted(steps(run, metric)) == [1, 2], metric
    assert max(steps(run, "actor/grad_norm").values()) > 0
    assert max(steps(run, "critic/grad_norm").values()) > 0
    assert max(steps(run, "rollout_corr/log_prob_gap_max").values()) < 1e-4
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["pushes_verified"], summary["evaluated_version"]) == (3, 2)
    assert [(line["step"], line["version"]) for line in lines(run / "evaluations.jsonl")] == [(0, 0), (2, 2)]


@pytest.mark.full
def test_the_run_leaves_behind_what_the_book_says(run: Path) -> None:
    named = first_cells(BOOK["outputs.md"].split("\n\n")[2])  # the table below title and first sentence
    assert len(named) >= 10
    missing = {name for name in named if not (run / name).exists()}
    of_others = {"rollbacks.jsonl", "flight_record_rank_0", "driver_port"}  # of bad numbers, hung ranks, other machines
    assert missing <= {"advice.jsonl", "profile/", *of_others}, "a run that went well on one machine has none of these"
