"""A run with several rewards at once: a function that fails at times, an async one, and a reward model of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ring_cases import lines, make_parts, settings, steps
from tiny_server import make_reward_model
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from megarl.cli import main

REWARDS = """
def picky(prompt, completion):
    if not prompt.uid.startswith("eval") and sum(completion.token_ids) % 3 == 0:
        raise KeyError("no such unit")
    return sum(map(str.isdigit, completion.text)) / 6

async def asked(prompt, completion):
    return {"score": 1.0, "length": len(completion.token_ids)}
"""


@pytest.mark.slow
def test_several_rewards_train_together_and_what_none_could_score_is_left_out(tmp_path: Path) -> None:
    parts, runs = make_parts(tmp_path / "parts"), tmp_path / "runs"
    (parts / "mine.py").write_text(REWARDS)
    more = [
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        f"reward.fn=[{parts}/mine.py:picky,{parts}/mine.py:asked,model]",
        "reward.weights={asked:0.5,model:0.1}",
        "reward.try_rows=0",
        f"reward.model.path={make_reward_model(tmp_path / 'judge', seed=3)}",
    ]
    assert main(["train", *settings(parts, runs, "several", *more)]) == 0
    run = runs / "several"
    unscored, lost = steps(run, "reward/unscored"), steps(run, "rollout/lost")
    samples, visits = lines(run / "samples.jsonl"), lines(run / "visits.jsonl")
    assert sum(unscored.values()) > 0
    assert sum(len(row["trained"]) for row in visits) + sum(lost.values()) == 2 * 4
    assert 2 * 4 * 4 - sum(unscored.values()) >= len(samples) > 0
    for sample in samples:
        extra = sample["reward_extra"]
        assert extra["asked/length"] == sample["num_tokens"]
        assert sample["reward"] == pytest.approx(extra["picky"] + 0.5 + 0.1 * extra["model"])
    assert len({sample["reward_extra"]["model"] for sample in samples}) > 1
    assert set(steps(run, "reward/asked").values()) == {1.0}
    assert all(grad > 0 for grad in steps(run, "actor/grad_norm").values())
    assert (run / "logs" / "reward_model" / "server_0.log").exists()


def make_judge(policy: Path, folder: Path) -> Path:
    """A classifier of the policy's shape and tokens, whose weights are large enough for scores to differ."""
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(policy, num_labels=1, initializer_range=0.3)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder


@torch.inference_mode()
def transformers_scores(judge: Path, samples: list[dict[str, Any]]) -> list[float | None]:
    """None for a completion whose text has not all of its tokens: special ones in the middle."""
    tokenizer = AutoTokenizer.from_pretrained(judge)
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    scores: list[float | None] = []
    for sample in samples:
        prompt, written = (tokenizer(sample[name])["input_ids"] for name in ("prompt", "completion"))
        written += [tokenizer.eos_token_id] * (sample["finish_reason"] == "stop")
        is_whole = len(written) == sample["num_tokens"]
        scores.append(float(model(torch.tensor([prompt + written])).logits) if is_whole else None)
    return scores


@pytest.mark.slow
def test_a_reward_model_scores_on_the_ranks_of_the_run(tmp_path: Path) -> None:
    """Over two pipeline stages, beside another reward; the run starts no server of it."""
    parts, runs = make_parts(tmp_path / "parts"), tmp_path / "runs"
    judge = make_judge(parts / "model", tmp_path / "judge")
    more = [
        "algorithm.adv_estimator=grpo",
        "actor.megatron.pipeline_model_parallel_size=2",
        "trainer.total_training_steps=2",
        f"reward.fn=[{parts}/digits.py:share_of_digits,model]",
        "reward.weights={model:0.1}",
        "reward.model.engine=megatron",
        f"reward.model.path={judge}",
    ]
    assert main(["train", *settings(parts, runs, "on_ranks", *more)]) == 0
    run = runs / "on_ranks"
    samples = lines(run / "samples.jsonl")
    for sample in samples:
        extra = sample["reward_extra"]
        assert sample["reward"] == pytest.approx(extra["share_of_digits"] + 0.1 * extra["model"])
    pairs = zip(samples, transformers_scores(judge, samples), strict=True)
    compared = [(sample["reward_extra"]["model"], score) for sample, score in pairs if score is not None]
    assert len({score for score, _ in compared}) > 4
    # Scores of size 1, and sums of some ten numbers of float32 in another order.
    assert [ours for ours, _ in compared] == pytest.approx([theirs for _, theirs in compared], abs=1e-5, rel=1e-5)
    by_step = steps(run, "reward/model")
    assert by_step.keys() == {1, 2}
    for step, mean in by_step.items():
        scores = [sample["reward_extra"]["model"] for sample in samples if sample["step"] == step]
        assert mean == pytest.approx(sum(scores) / len(scores))
    assert all(grad > 0 for grad in steps(run, "actor/grad_norm").values())
    assert not (run / "logs" / "reward_model").exists()
