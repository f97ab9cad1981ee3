"""Which tokens clip_cov and kl_cov treat otherwise."""

import pytest
import torch

from megarl.algo.losses.covariance import covariance, num_selected, select_clip_cov, select_kl_cov

NAN = float("nan")
OLD = torch.tensor([-1.0, -3.0, NAN, -1.0, -3.0])
ADVANTAGES = torch.tensor([3.0, -1.0, NAN, 0.0, 2.0])
MASK = torch.tensor([True, True, False, True, True])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_covariance_by_hand():
    # mean A 1, mean l_old -2
    assert covariance(OLD, ADVANTAGES, MASK).tolist() == [2.0, 2.0, 0.0, -1.0, -1.0]


def test_how_many_are_selected():
    mask = torch.ones(100, dtype=torch.bool)
    assert [num_selected(share, mask, "x") for share in (2e-4, 0.29, 0.3, 1.0)] == [1, 29, 30, 100]
    assert num_selected(0.5, mask[:0], "x") == 1
    for share in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match=f"x={share}: expected a number above 0 and at most 1"):
            num_selected(share, mask, "x")


def test_kl_cov_takes_the_largest_and_of_equals_the_earlier():
    def chosen(share):
        return select_kl_cov(OLD, ADVANTAGES, MASK, generator=generator(), kl_cov_ratio=share).tolist()

    assert chosen(1e-4) == [True, False, False, False, False]
    assert chosen(0.5) == [True, True, False, False, False]
    assert chosen(0.75) == [True, True, False, True, False]
    assert chosen(1.0) == MASK.tolist()
    many = torch.zeros(3000)
    equals = select_kl_cov(many, many, torch.ones(3000, dtype=torch.bool), generator=generator(), kl_cov_ratio=0.1)
    assert equals.nonzero().squeeze(1).tolist() == list(range(300))


def test_clip_cov_draws_between_its_bounds_and_takes_all_if_they_are_fewer():
    def chosen(share, low, high, seed=0):
        hyperparameters = {"clip_cov_ratio": share, "clip_cov_lb": low, "clip_cov_ub": high}
        return select_clip_cov(OLD, ADVANTAGES, MASK, generator=generator(seed), **hyperparameters).tolist()

    assert chosen(1.0, 1.0, 5.0) == [True, True, False, False, False]  # two candidates, four wanted
    assert chosen(1.0, 2.0, 5.0) == chosen(1.0, 1.0, 2.0) == [False] * 5  # the bounds themselves are outside
    assert chosen(1.0, -1.5, 1.5) == [False, False, False, True, True]
    one = {tuple(chosen(1e-4, 1.0, 5.0, seed)) for seed in range(20)}
    assert one == {(True, False, False, False, False), (False, True, False, False, False)}
    assert chosen(1e-4, 1.0, 5.0, 3) == chosen(1e-4, 1.0, 5.0, 3)


@pytest.mark.parametrize("select", [select_clip_cov, select_kl_cov])
def test_nothing_is_selected_where_nothing_is_trainable(select):
    assert not select(OLD, ADVANTAGES, MASK & False, generator=generator()).any()
    assert select(OLD[:0], ADVANTAGES[:0], MASK[:0], generator=generator()).shape == (0,)
