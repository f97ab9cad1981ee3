"""What estimators are made of."""

import estimator_reference as ref
import pytest
import torch

from megarl.algo.advantages.gae import gae, whiten
from megarl.algo.advantages.groups import Groups
from megarl.algo.advantages.token_baseline import optimal_token_baseline

D = torch.float64


def test_gae_of_a_long_sequence_keeps_float32_accuracy():
    n = 5000
    g = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(n, generator=g), torch.randn(n, generator=g)
    mask, segments = torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)
    fast, _ = gae(rewards, values, mask, segments, gamma=1.0, lam=1.0)
    slow, _ = ref.gae_sequence(rewards.tolist(), values.tolist(), [True] * n, 1.0, 1.0)
    assert fast.tolist() == pytest.approx(slow, rel=1e-6, abs=1e-6)


def test_whiten_by_hand_and_unchanged_below_two():
    mask = torch.tensor([True, False, True, True])
    x = torch.tensor([1.0, torch.nan, 2.0, 3.0], dtype=D)
    assert whiten(x, mask).tolist() == pytest.approx([-1.0, 0.0, 0.0, 1.0], rel=1e-7)
    assert whiten(x, torch.tensor([True, False, False, False])).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert whiten(x, torch.zeros(4, dtype=torch.bool)).tolist() == [0.0] * 4
    assert whiten(torch.full((4,), 0.3), torch.ones(4, dtype=torch.bool)).abs().max() < 1e-6


def test_groups_by_hand():
    groups = Groups.of(torch.tensor([3, -1, 3, 3, 8]), torch.tensor([True, True, True, False, False]))
    x = torch.tensor([1.0, 2.0, 5.0, torch.nan, torch.inf])
    assert groups.total(x).tolist() == [6, 2, 6, 6, 0]
    assert groups.size.tolist() == [2, 1, 2, 2, 0]
    assert groups.compares.tolist() == [True, False, True, False, False]
    assert groups.centred(x).tolist() == [-2, 0, 2, 0, 0]
    assert groups.std(x).tolist() == pytest.approx([8**0.5, 0, 8**0.5, 8**0.5, 0])
    assert groups.highest(x).tolist() == [5, 2, 5, 5, -torch.inf]
    assert groups.differ(x).tolist() == [True, False, True, False, False]
    assert groups.without(torch.tensor([False, False, True, False, False])).highest(x).tolist()[:3] == [1, 2, 1]


def test_of_a_certain_policy_the_token_baseline_is_zero():
    """p = 1, sum p^2 = 1: W = 0; rounding may make the energy a little negative, which must not divide by about 0."""
    columns = {"old_log_probs": torch.tensor([1e-7, 0]), "sum_pi_squared": torch.tensor([1, 1 - 1e-7])}
    rewards, mask, segments = torch.tensor([1.0, 3.0]), torch.tensor([True, True]), torch.tensor([0, 1])
    how = {"group_ids": torch.tensor([0, 0]), "gamma": 1.0}
    advantages, _ = optimal_token_baseline(rewards, mask, segments, **how, **columns)
    assert advantages.tolist() == pytest.approx([1, 3], abs=1e-6)
