import estimator_reference as ref
import pytest
import torch
from algo_reference import Packed, packs
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.advantages.gae import gae, returns_to_go, whiten
from megarl.algo.advantages.single_sample import gae_whitened, reinforce_plus_plus, remax

D = torch.float64


def test_gae_by_hand():
    mask = torch.tensor([False, True, True, False, True])  # one tool token between two steps
    values = torch.tensor([9.0, 1.0, 2.0, torch.nan, 3.0], dtype=D)
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 4.0], dtype=D)
    advantages, returns = gae(rewards, values, mask, torch.zeros(5, dtype=torch.int64), gamma=0.5, lam=0.5)
    # deltas 0 + .5*2 - 1 = 0;  .5*3 - 2 = -.5;  4 - 3 = 1;  A = 1;  -.5 + .25 = -.25;  0 - .0625
    assert advantages.tolist() == pytest.approx([0.0, -0.0625, -0.25, 0.0, 1.0])
    assert returns.tolist() == pytest.approx([0.0, 0.9375, 1.75, 0.0, 4.0])


def test_a_reward_on_a_masked_token_moves_back_to_the_last_step_and_before_any_step_is_dropped():
    mask = torch.tensor([False, True, False, True, False])
    rewards = torch.tensor([100.0, 0.0, 3.0, 0.0, 5.0], dtype=D)
    segments = torch.zeros(5, dtype=torch.int64)
    _, returns = gae(rewards, torch.zeros(5, dtype=D), mask, segments, gamma=1.0, lam=1.0)
    assert returns.tolist() == [0.0, 8.0, 0.0, 5.0, 0.0]
    assert returns_to_go(rewards, mask, segments, gamma=0.5).tolist() == [0.0, 5.5, 0.0, 5.0, 0.0]  # 3 + 5/2


def test_sequences_do_not_leak_into_each_other():
    segments = torch.tensor([0, 0, 2, 2, 3])  # sequence 1 is empty, 3 has one token
    mask = torch.tensor([True, True, True, False, True])
    rewards = torch.tensor([0.0, 1.0, 0.0, 10.0, 100.0], dtype=D)
    _, returns = gae(rewards, torch.ones(5, dtype=D), mask, segments, gamma=1.0, lam=1.0)
    assert returns.tolist() == [1.0, 1.0, 10.0, 0.0, 100.0]


def test_gae_of_nothing():
    empty = torch.zeros(0, dtype=D)
    advantages, returns = gae(empty, empty, empty.bool(), empty.long(), gamma=1.0, lam=1.0)
    assert (advantages.tolist(), returns.tolist()) == ([], [])
    x, segments = torch.full((3,), torch.nan, dtype=D), torch.zeros(3, dtype=torch.int64)
    advantages, _ = gae(torch.zeros(3, dtype=D), x, torch.zeros(3, dtype=torch.bool), segments, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [0.0, 0.0, 0.0]


@given(packs, st.sampled_from([0.0, 0.5, 0.97, 1.0]), st.sampled_from([0.0, 0.9, 1.0]), st.integers(0, 10**6))
def test_gae_agrees_with_the_slow_reference(packed: Packed, gamma, lam, seed):
    batch = packed.batch
    rewards = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed), dtype=D)
    mask = batch.columns["response_mask"] != 0
    fast = gae(rewards, batch.columns["values"], mask, batch.segment_ids, gamma=gamma, lam=lam)
    slow_advantages, slow_returns = [], []
    for r, v, m in zip(batch.split(rewards), packed.lists("values"), packed.masks, strict=True):
        a, g = ref.gae_sequence(r.tolist(), v, m, gamma, lam)
        slow_advantages += a
        slow_returns += g
    assert fast[0].tolist() == pytest.approx(slow_advantages, rel=1e-10, abs=1e-12)
    assert fast[1].tolist() == pytest.approx(slow_returns, rel=1e-10, abs=1e-12)


def test_gae_of_a_long_sequence_keeps_float32_accuracy():
    n = 5000
    g = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(n, generator=g), torch.randn(n, generator=g)
    mask, segments = torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)
    fast, _ = gae(rewards, values, mask, segments, gamma=1.0, lam=1.0)
    slow, _ = ref.gae_sequence(rewards.tolist(), values.tolist(), [True] * n, 1.0, 1.0)
    assert fast.tolist() == pytest.approx(slow, rel=1e-6, abs=1e-6)


def test_the_advantages_of_gae_are_whitened_and_its_returns_are_not():
    mask, segments = torch.tensor([False, True, True, False, True]), torch.tensor([0, 0, 0, 1, 1])
    rewards, values = torch.tensor([0.0, 0, 2, 0, 4]), torch.tensor([9.0, 1, 1, 9, 1])
    advantages, returns = gae_whitened(rewards, mask, segments, values=values, gamma=1.0, lam=1.0)
    # raw advantages 1, 1, 3: mean 5/3, unbiased variance (4/9 + 4/9 + 16/9) / 2 = 4/3, std 1.154701
    assert advantages.tolist() == pytest.approx([0, -0.5773503, -0.5773503, 0, 1.1547005], abs=1e-6)
    assert returns.tolist() == [0, 2, 2, 0, 4]


def test_reinforce_plus_plus_by_hand_carries_the_return_over_a_masked_token():
    mask, segments = torch.tensor([False, True, True, False, True]), torch.zeros(5, dtype=torch.int64)
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 4.0])
    advantages, returns = reinforce_plus_plus(rewards, mask, segments, gamma=0.5)
    assert returns.tolist() == [0, 2, 2, 0, 4]  # 4;  0 + 4/2, the masked token being no step;  1 + 2/2
    # mean 8/3, variance (4/9 + 4/9 + 16/9) / 2 = 4/3
    assert advantages.tolist() == pytest.approx([0, -0.5773503, -0.5773503, 0, 1.1547005], abs=1e-6)


def test_remax_by_hand_subtracts_the_greedy_reward_from_the_return_to_go():
    mask, segments = torch.tensor([False, True, True, True, False]), torch.tensor([0, 0, 0, 1, 1])
    rewards = torch.tensor([0.0, -0.25, 1.0, 3.0, 0.0])
    advantages, returns = remax(rewards, mask, segments, greedy_score=torch.tensor([0.5, 5.0]))
    assert returns.tolist() == [0, 0.75, 1, 3, 0]
    assert advantages.tolist() == [0, 0.25, 0.5, -2, 0]  # .75 - .5;  1 - .5;  3 - 5


def test_whiten_by_hand_and_unchanged_below_two():
    mask = torch.tensor([True, False, True, True])
    x = torch.tensor([1.0, torch.nan, 2.0, 3.0], dtype=D)
    assert whiten(x, mask).tolist() == pytest.approx([-1.0, 0.0, 0.0, 1.0], rel=1e-7)
    assert whiten(x, torch.tensor([True, False, False, False])).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert whiten(x, torch.zeros(4, dtype=torch.bool)).tolist() == [0.0] * 4
    assert whiten(torch.full((4,), 0.3), torch.ones(4, dtype=torch.bool)).abs().max() < 1e-6


@given(packs)
def test_whiten_agrees_with_the_slow_reference(packed: Packed):
    mask = packed.batch.columns["response_mask"] != 0
    x = packed.batch.columns["values"]
    assert whiten(x, mask)[mask].tolist() == pytest.approx(ref.whiten(x[mask].tolist()), rel=1e-9, abs=1e-12)


def test_the_step_after_a_rows_last_is_the_first_of_the_next_row():
    """Rows "p a" and "p a q b": the answer a is context in the second row, and no step there."""
    mask = torch.tensor([0, 1, 0, 0, 0, 1]) != 0
    rewards, values = torch.tensor([0, 0, 0, 0, 0, 1.0]), torch.tensor([9, 0.5, 9, 9, 9, 0.25])
    sample = torch.zeros(6, dtype=torch.int64)
    advantages, returns = gae(rewards, values, mask, sample, gamma=0.5, lam=0.5)
    # b: 1 - 0.25 = 0.75;   a: 0 + 0.5 * 0.25 - 0.5 + 0.25 * 0.75 = -0.1875
    assert advantages.tolist() == [0, -0.1875, 0, 0, 0, 0.75]
    assert returns.tolist() == [0, 0.3125, 0, 0, 0, 1]
    assert returns_to_go(rewards, mask, sample, gamma=0.5).tolist() == [0, 0.5, 0, 0, 0, 1]
