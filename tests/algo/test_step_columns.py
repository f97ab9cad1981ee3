"""What is made once from a whole optimizer step."""

import math

import pytest
import torch

from megarl.algo import ActorLoss, CriticLoss, step_columns
from megarl.algo.step_columns import rollout_weights
from megarl.samples.batch import Batch

NAN = math.nan


def step(**columns) -> Batch:
    """Sequences of 3, 1 and 2 tokens; the first token of the first is masked."""
    base = {
        "response_mask": [0.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        "old_log_probs": [NAN, -1.0, -3.0, -1.0, -3.0, -2.0],
        "advantages": [NAN, 2.0, -2.0, -1.0, 1.0, 0.0],
    }
    tensors = {name: torch.tensor(column) for name, column in (base | columns).items()}
    rows = {"group": torch.tensor([4, 4, 7])}
    return Batch(torch.zeros(6, dtype=torch.int64), torch.tensor([3, 1, 2]), tensors, rows)


def test_keep_leaves_numerators_and_denominators_alike():
    batch = step(keep=[1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    made = step_columns(batch, loss=ActorLoss(), agg_mode="token-mean")
    assert made.columns["response_mask"].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert made.columns["weight"].tolist() == [0.0, 0.5, 0.0, 0.5, 0.0, 0.0]
    made = step_columns(batch, loss=CriticLoss(), agg_mode="prompt-mean-token-mean")
    assert made.columns["weight"].tolist() == [0.0, 0.5, 0.0, 0.5, 0.0, 0.0]  # one prompt group is left
    made = step_columns(batch, loss=CriticLoss(), agg_mode="seq-mean-token-sum-norm", loss_scale_factor=4.0)
    assert made.columns["weight"].tolist() == [0.0, 0.125, 0.0, 0.125, 0.0, 0.0]


def test_a_critic_needs_no_more_than_weights():
    made = step_columns(step(), loss=CriticLoss(), agg_mode="token-sum", bypass=True, normalize=True)
    assert made.columns["old_log_probs"][1:].tolist() == [-1.0, -3.0, -1.0, -3.0, -2.0]
    assert "rollout_weight" not in made.columns


def test_bypass_takes_the_servers_log_probs_as_the_old_ones():
    rollout = [NAN, -1.5, -3.5, -1.5, -3.5, -2.5]
    made = step_columns(step(rollout_log_probs=rollout), loss=ActorLoss(), agg_mode="token-mean", bypass=True)
    assert made.columns["old_log_probs"][1:].tolist() == rollout[1:]
    with pytest.raises(ValueError, match="rollout_correction.bypass=true needs the column rollout_log_probs"):
        step_columns(step(), loss=ActorLoss(), agg_mode="token-mean", bypass=True)


def test_bypass_with_a_weight_is_for_losses_without_a_ratio():
    batch = step(rollout_log_probs=[0.0] * 6, rollout_weight=[1.0] * 6)
    with pytest.raises(AssertionError, match="the ratio of gspo to the server's policy is the correction already"):
        step_columns(batch, loss=ActorLoss("gspo", use_rollout_weight=True), agg_mode="token-mean", bypass=True)
    loss = ActorLoss("dro", args={"beta": 1.0}, use_rollout_weight=True)
    made = step_columns(batch, loss=loss, agg_mode="token-mean", bypass=True)
    assert made.columns["rollout_weight"].tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_rollout_weights_by_hand():
    w = [NAN, 1.0, 4.0, 0.5, 0.0, 2.0]

    def made(name, **how):
        batch = step(rollout_weight=w)
        loss = ActorLoss(name, use_rollout_weight=True)
        return step_columns(batch, loss=loss, agg_mode="token-mean", **how).columns["rollout_weight"].tolist()

    assert made("ppo") == [0.0, 1.0, 4.0, 0.5, 0.0, 2.0]
    assert made("ppo", normalize=True) == pytest.approx([0.0, *(x / 1.5 for x in w[1:])])  # their mean is 7.5 / 5
    assert made("gspo") == pytest.approx([0.0, 2.0, 2.0, 0.5, 0.0, 0.0])  # sqrt(4), and 0 where one is 0
    assert made("gmpo", normalize=True) == pytest.approx([0.0, 2 / 0.9, 2 / 0.9, 0.5 / 0.9, 0.0, 0.0])  # 4.5 / 5
    with pytest.raises(ValueError, match="rollout_correction.level needs the column rollout_weight"):
        step_columns(step(), loss=ActorLoss(use_rollout_weight=True), agg_mode="token-mean")


def test_weights_are_normalised_under_those_of_the_aggregation():
    """Three sequences of 2, 1 and 2 tokens: means over them, and not over tokens, where the loss is one over them."""
    batch = step(rollout_weight=[NAN, 1.0, 4.0, 0.5, 0.0, 2.0])
    loss = ActorLoss("ppo", use_rollout_weight=True)
    for mode, mean in (
        ("token-mean", 7.5 / 5),
        ("seq-mean-token-mean", (2.5 + 0.5 + 1.0) / 3),
        ("seq-mean-token-sum", 7.5 / 5),
    ):
        made = step_columns(batch, loss=loss, agg_mode=mode, normalize=True).columns
        assert made["rollout_weight"].tolist() == pytest.approx([x / mean for x in (0, 1, 4, 0.5, 0, 2)])
        weighted = (made["weight"] * made["rollout_weight"]).sum() / made["weight"].sum()
        assert float(weighted) == pytest.approx(1.0)


def test_weights_that_are_all_zero_stay_zero():
    mask, segments = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    for per_sequence in (False, True):
        w = rollout_weights(torch.zeros(3), mask, segments, of_loss=torch.ones(3), per_sequence=per_sequence)
        assert w.tolist() == [0.0, 0.0, 0.0]


def test_selected_is_made_from_the_kept_tokens_of_the_whole_step():
    loss = ActorLoss("kl_cov", args={"kl_cov_ratio": 0.5})
    made = step_columns(step(), loss=loss, agg_mode="token-mean")
    # mean A 0, mean l_old -2: cov 2, 2, -1, -1, 0
    assert made.columns["selected"].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    made = step_columns(step(keep=[1.0, 0.0, 1.0, 1.0, 1.0, 1.0]), loss=loss, agg_mode="token-mean")
    # mean A -0.5, mean l_old -2.25: cov 1.125, -0.625, -1.125, 0.125
    assert made.columns["selected"].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]


def test_the_seed_decides_what_is_drawn():
    loss = ActorLoss("clip_cov")
    drawn = [
        tuple(step_columns(step(), loss=loss, agg_mode="token-mean", seed=seed).columns["selected"].tolist())
        for seed in (*range(12), *range(12))
    ]
    assert drawn[:12] == drawn[12:]
    assert len(set(drawn)) == 2
    assert all(sum(row) == 1 for row in drawn)
