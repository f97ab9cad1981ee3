import math

import algo_reference as ref
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo import POLICY_LOSSES
from megarl.algo.policy import importance_ratio, ppo, reinforce

D = torch.float64


def columns(log_ratios, advantages, dtype=D):
    """(log_probs, old_log_probs, advantages, mask, segment_ids) of one sequence with these ratios."""
    old = torch.linspace(-2, -1, len(log_ratios), dtype=dtype)
    new = old + torch.tensor(log_ratios, dtype=dtype)
    mask, segments = torch.ones(len(old), dtype=torch.bool), torch.zeros(len(old), dtype=torch.int64)
    return new.requires_grad_(), old, torch.tensor(advantages, dtype=dtype), mask, segments


def test_ppo_by_hand():
    ratios = [1.0, 1.5, 0.5, 1.5, 0.5, 4.0, 1.1]
    advantages = [2.0, 2.0, 2.0, -2.0, -2.0, -2.0, 0.0]
    loss, info = ppo(*columns([math.log(r) for r in ratios], advantages))
    #        in range, clipped above, free below, free above, clipped below, dual clip (3 * 2), no advantage
    assert loss.tolist() == pytest.approx([-2.0, -2.4, -1.0, 3.0, 1.6, 6.0, 0.0])
    assert info["pg_clipfrac"].tolist() == [False, True, False, False, True, False, False]
    assert info["pg_clipfrac_lower"].tolist() == [False, False, False, False, False, True, False]


def test_ppo_gradient_by_hand():
    ratios = [1.0, 1.5, 0.5, 1.5, 0.5, 4.0]
    new, *rest = columns([math.log(r) for r in ratios], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    ppo(new, *rest)[0].sum().backward()
    # dL/dl = -A r where no clip holds, else 0; at ratio 1 both branches are equal and share it
    assert new.grad.tolist() == pytest.approx([-2.0, 0.0, -1.0, 3.0, 0.0, 0.0])


def test_clip_settings_are_used_one_by_one():
    new, *rest = columns([math.log(1.25), math.log(0.85), math.log(10.0)], [1.0, -1.0, -1.0])
    assert ppo(new, *rest, clip_high=0.3)[0].tolist() == pytest.approx([-1.25, 0.85, 3.0])
    assert ppo(new, *rest, clip_low=0.1)[0].tolist() == pytest.approx([-1.2, 0.9, 3.0])
    assert ppo(new, *rest, clip_c=5.0)[0].tolist() == pytest.approx([-1.2, 0.85, 5.0])
    loss, info = ppo(new, *rest, clip_c=None)
    assert loss.tolist() == pytest.approx([-1.2, 0.85, 10.0])
    assert "pg_clipfrac_lower" not in info


@pytest.mark.parametrize("knobs", [{"clip_low": -0.1}, {"clip_low": 1.1}, {"clip_high": -1.0}, {"clip_c": 1.0}])
def test_ppo_refuses_clips_without_meaning(knobs):
    with pytest.raises(ValueError, match="clip_.*want"):
        ppo(*columns([0.0], [1.0]), **knobs)


def test_reinforce_by_hand():
    new, *rest = columns([0.0, 0.5], [3.0, -1.0])
    loss, info = reinforce(new, *rest)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([6.0, -0.5])  # -3 * -2, +1 * (-1 + 0.5)
    assert new.grad.tolist() == [-3.0, 1.0]
    assert info == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip_c", [3.0, None])
def test_ratios_up_to_e45_stay_finite(dtype, clip_c):
    new, *rest = columns([45.0, -45.0, 45.0, -45.0], [1.0, 1.0, -1.0, -1.0], dtype)
    loss, _ = ppo(new, *rest, clip_c=clip_c)
    loss.sum().backward()
    bound = 3.0 if clip_c else math.exp(20)
    assert loss.tolist() == pytest.approx([-1.2, -math.exp(-20), bound, 0.8])
    assert new.grad.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_equal_log_probs_give_exactly_one():
    x = torch.randn(1000)
    assert torch.equal(importance_ratio(x, x), torch.ones(1000))


def test_aliases():
    assert POLICY_LOSSES["vanilla"] is POLICY_LOSSES["grpo"] is POLICY_LOSSES["ppo"] is ppo


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_gradients_agree_with_finite_differences(name):
    new, *rest = columns([0.05, -0.1, 0.5, -0.5, 0.5, -0.5, 1.5], [1.0, -2.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    assert torch.autograd.gradcheck(lambda x: POLICY_LOSSES[name](x, *rest)[0], (new,))


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-4, 4)), min_size=1, max_size=8),
    st.floats(0.01, 0.9),
    st.floats(0.01, 2),
    st.one_of(st.none(), st.floats(1.1, 10)),
)
def test_ppo_agrees_with_the_slow_reference(tokens, low, high, c):
    log_ratios, advantages = zip(*tokens, strict=True)
    new, old, *rest = columns(log_ratios, advantages)
    fast = ppo(new, old, *rest, clip_low=low, clip_high=high, clip_c=c)[0]
    slow = [ref.ppo_token(*x, low, high, c) for x in zip(new.tolist(), old.tolist(), advantages, strict=True)]
    assert fast.tolist() == pytest.approx(slow, rel=1e-12, abs=1e-12)
