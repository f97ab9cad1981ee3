import math

import algo_reference as ref
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo import KL_ESTIMATORS, AdaptiveKL, FixedKL, kl_estimate, make_kl_controller

D = torch.float64
NAMES = sorted(KL_ESTIMATORS)


def at(xs, dtype=D):
    """(log_probs, ref_log_probs) with these differences x = l - l_ref."""
    base = torch.full((len(xs),), -1.0, dtype=dtype)
    return (base + torch.tensor(xs, dtype=dtype)).requires_grad_(), base


def test_values_by_hand():
    new, base = at([0.5, -1.0, 0.0])
    by_hand = {
        "kl": [0.5, -1.0, 0.0],
        "mse": [0.125, 0.5, 0.0],
        "abs": [0.5, 1.0, 0.0],
        "low_var_kl": [math.exp(-0.5) - 0.5, math.e - 2, 0.0],
    }
    for name, values in by_hand.items():
        assert kl_estimate(name, new, base).tolist() == pytest.approx(values)
        assert kl_estimate(f"{name}+", new, base).tolist() == pytest.approx(values)


def test_gradients_by_hand():
    xs = [0.5, -1.0, -4.0]
    by_hand = {
        "k1": [1.0, 1.0, 1.0],
        "k2": xs,
        "abs": [1.0, -1.0, -1.0],
        "k3": [1 - math.exp(-0.5), 1 - math.e, -12.610868638149876],
    }
    for name, gradient in by_hand.items():
        new, base = at(xs)
        kl_estimate(name, new, base).sum().backward()
        assert new.grad.tolist() == pytest.approx(gradient)


@pytest.mark.parametrize("name", NAMES)
def test_plus_has_the_value_of_the_name_and_the_gradient_of_k2(name):
    new, base = at([0.5, -1.0, -4.0, 90.0, -90.0])
    plain, plus = kl_estimate(name, new, base), kl_estimate(f"{name}+", new, base)
    plus.sum().backward()
    assert plus.tolist() == plain.tolist()
    assert new.grad.tolist() == pytest.approx([0.5, -1.0, -4.0, 90.0, -90.0])


def test_k3_is_smooth_where_the_line_begins_and_keeps_its_slope():
    start = 2.610868638149876
    new, base = at([-start + 1e-7, -start - 1e-7, -3.0, -90.0])
    value = kl_estimate("k3", new, base)
    value.sum().backward()
    assert value.tolist() == pytest.approx([10.0, 10.0, 10 + 12.610868638149876 * (3 - start), 1112.05], rel=1e-5)
    assert new.grad.tolist() == pytest.approx([-12.61087] * 4, rel=1e-5)


def test_k3_keeps_small_differences_in_float32():
    new, base = at([1e-3, -1e-3], torch.float32)
    x = (new - base).tolist()
    assert kl_estimate("k3", new, base).tolist() == pytest.approx([v * v / 2 - v**3 / 6 for v in x], rel=1e-3)


@pytest.mark.parametrize("name", [*NAMES, *(f"{n}+" for n in NAMES)])
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_huge_differences_stay_finite(name, dtype):
    new, base = at([90.0, -90.0, 300.0, -300.0], dtype)
    value = kl_estimate(name, new, base)
    value.sum().backward()
    assert bool(value.isfinite().all() and new.grad.isfinite().all())


@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_with_finite_differences(name):
    new, base = at([0.5, -1.0, 2.0, -2.5, -2.7, -5.0])
    assert torch.autograd.gradcheck(lambda x: kl_estimate(name, x, base), (new,))


@given(st.sampled_from(NAMES), st.lists(st.floats(-30, 30), min_size=1, max_size=6))
def test_agrees_with_the_slow_reference(name, xs):
    new, base = at(xs)
    slow = [ref.kl_token(name, a, b) for a, b in zip(new.tolist(), base.tolist(), strict=True)]
    assert kl_estimate(name, new, base).tolist() == pytest.approx(slow, rel=1e-9, abs=1e-12)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'k4\+': expected one of kl, k1"):
        kl_estimate("k4+", *at([0.0]))


def test_expected_gradients_are_those_the_table_names():
    """Exact expectations over a vocabulary of four, on-policy: k1 0, k2 reverse KL, k3 forward KL, abs twice the TV."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, generator=g, dtype=D).requires_grad_()
    q = (logits.detach() + 0.5 * torch.randn(4, generator=g, dtype=D)).log_softmax(0)  # inside k3's curved part

    def expected(name):
        log_p = logits.log_softmax(0)
        return torch.autograd.grad((log_p.exp().detach() * kl_estimate(name, log_p, q)).sum(), logits)[0]

    def gradient(f):
        log_p = logits.log_softmax(0)
        return torch.autograd.grad(f(log_p), logits)[0]

    reverse = gradient(lambda log_p: (log_p.exp() * (log_p - q)).sum())
    forward = gradient(lambda log_p: (q.exp() * (q - log_p)).sum())
    twice_tv = gradient(lambda log_p: (log_p.exp() - q.exp()).abs().sum())
    assert torch.allclose(expected("k1"), torch.zeros(4, dtype=D), atol=1e-12)
    assert torch.allclose(expected("k2"), reverse)
    assert torch.allclose(expected("k3"), forward)
    assert torch.allclose(expected("abs"), twice_tv)
    assert torch.allclose(expected("k1+"), reverse)


def test_fixed_controller_stays():
    control = make_kl_controller("fixed", kl_coef=0.01)
    control.update(5.0, 100)
    control.load_state_dict({"value": 7.0})
    assert isinstance(control, FixedKL)
    assert control.value == 0.01
    assert control.state_dict() == {}


def test_adaptive_controller_by_hand_and_through_a_checkpoint():
    control = make_kl_controller("adaptive", kl_coef=0.1, target_kl=0.1, horizon=1000)
    control.update(0.11, 100)  # error 0.1
    assert control.value == pytest.approx(0.1 * 1.01)
    control.update(5.0, 100)  # clipped to 0.2
    assert control.value == pytest.approx(0.1 * 1.01 * 1.02)
    control.update(0.0, 100)  # clipped to -0.2
    assert control.value == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)
    other = AdaptiveKL(0.5)
    other.load_state_dict(control.state_dict())
    assert other.value == control.value
    other.load_state_dict({})
    assert other.value == control.value


def test_controllers_refuse_what_has_no_meaning():
    with pytest.raises(ValueError, match="kl_ctrl.type='pid': expected one of fixed, adaptive"):
        make_kl_controller("pid", kl_coef=0.1)
    with pytest.raises(ValueError, match="target_kl=0"):
        make_kl_controller("adaptive", kl_coef=0.1, target_kl=0)
