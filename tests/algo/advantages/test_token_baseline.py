import math

import pytest
import torch

from megarl.algo.advantages.token_baseline import optimal_token_baseline

LOG_HALF, LOG_QUARTER = math.log(0.5), math.log(0.25)


def estimate(rewards, mask, lengths, groups, old, squares, gamma=1.0):
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    columns = (torch.tensor(x, dtype=torch.float32) for x in (rewards, old, squares))
    rewards, old, squares = columns
    advantages, returns = optimal_token_baseline(
        rewards,
        torch.tensor(mask) != 0,
        segments,
        group_ids=torch.tensor(groups, dtype=torch.int64),
        old_log_probs=old,
        sum_pi_squared=squares,
        gamma=gamma,
    )
    return advantages.tolist(), returns.tolist()


def test_two_samples_by_hand_with_a_masked_token_between_the_steps():
    advantages, returns = estimate(
        rewards=[0, 0, 0, 4, 0, 1],
        mask=[0, 1, 0, 1, 1, 1],
        lengths=[4, 2],
        groups=[3, 3],
        old=[9, LOG_HALF, 9, LOG_QUARTER, LOG_QUARTER, LOG_HALF],
        squares=[9, 0.5, 9, 0.25, 0.5, 0.375],
    )
    # sample 0: energies 1 - 1 + .5 = .5 and 1 - .5 + .25 = .75, W = .5, 1.25; sample 1: 1 and .375, W = 1, 1.375
    # baselines (4*.5 + 1*1) / 1.5 = 2 and (4*1.25 + 1*1.375) / 2.625 = 2.4285714
    assert returns == [0, 4, 0, 4, 1, 1]
    assert advantages == pytest.approx([0, 2, 0, 1.5714286, -1, -1.4285714], abs=1e-6)


def test_a_sample_that_outlives_its_group_has_baseline_zero_and_one_that_was_always_alone_gets_nothing():
    advantages, returns = estimate(
        rewards=[0, 4, 2, 0, 7, 0],
        mask=[1, 1, 1, 0, 1, 0],
        lengths=[2, 1, 1, 1, 1],  # the last has no token; the fourth is alone in its group
        groups=[0, 0, 0, 1, 0],
        old=[LOG_HALF] * 6,
        squares=[0.5] * 6,
    )
    assert returns == [4, 4, 2, 0, 7, 0]
    assert advantages == pytest.approx([1, 4, -1, 0, 0, 0], abs=1e-6)  # baseline (4*.5 + 2*.5) / 1 = 3, then 0


def test_the_return_to_go_is_discounted():
    advantages, returns = estimate([0, 4, 0, 0], [1, 1, 1, 1], [2, 2], [0, 0], [LOG_HALF] * 4, [0.5] * 4, gamma=0.5)
    assert returns == [2, 4, 0, 0]
    assert advantages == pytest.approx([1, 2, -1, -2], abs=1e-6)  # equal weights: baselines 1 and 2


def test_a_certain_policy_has_no_gradient_and_a_baseline_of_zero():
    # p = 1, sum p^2 = 1: W = 0; rounding may make the energy a little negative, which must not divide by about zero
    advantages, _ = estimate([1, 3], [1, 1], [1, 1], [0, 0], [1e-7, 0], [1, 1 - 1e-7])
    assert advantages == pytest.approx([1, 3], abs=1e-6)


def test_nothing_to_train_on():
    assert estimate([0, 0], [0, 0], [1, 1], [0, 0], [math.nan] * 2, [math.nan] * 2) == ([0, 0], [0, 0])
    assert estimate([], [], [], [], [], []) == ([], [])
