"""A run with several rewards at once: a function that fails at times, an async one, and a reward model of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from ring_cases import lines, make_parts, settings, steps
from tiny_server import make_reward_model

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
