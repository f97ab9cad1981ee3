import math

import algo_reference as ref
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo import KL_ESTIMATORS, AdaptiveKL, FixedKL, kl_estimate, make_kl_controller

D = torch.float64
NAMES = sorted(ref.KL_ESTIMATORS)


def at(xs, dtype=D):
    """(log_probs, ref_log_probs) with these differences x = l - l_ref."""
    base = torch.full((len(xs),), -1.0, dtype=dtype)
    return (base + torch.tensor(xs, dtype=dtype)).requires_grad_(), base


def test_every_estimator_has_a_reference():
    assert ref.missing(KL_ESTIMATORS, ref.KL_ESTIMATORS) == ""


@pytest.mark.parametrize("name", NAMES)
def test_plus_has_the_value_of_the_name_and_the_gradient_of_k2(name):
    new, base = at([0.5, -1.0, -4.0, 90.0, -90.0])
    plain, plus = kl_estimate(name, new, base), kl_estimate(f"{name}+", new, base)
    plus.sum().backward()
    assert plus.tolist() == plain.tolist()
    assert new.grad.tolist() == pytest.approx([0.5, -1.0, -4.0, 90.0, -90.0])


def test_k3_keeps_small_differences_in_float32():
    new, base = at([1e-3, -1e-3], torch.float32)
    x = (new - base).tolist()
    assert kl_estimate("k3", new, base).tolist() == pytest.approx([v * v / 2 - v**3 / 6 for v in x], rel=1e-3)


def test_beyond_10_k3_is_linear_and_the_clamped_one_has_no_gradient():
    new, base = at([-1.0, -5.0])
    for name, at_5, slope in (("k3", 10 + 12.610868638149876 * (5 - 2.610868638149876), -12.610868638149876),
                              ("k3_clamped", 10.0, 0.0)):  # fmt: skip
        value = kl_estimate(name, new, base)
        (grad,) = torch.autograd.grad(value.sum(), new)
        assert value.tolist() == pytest.approx([math.e - 2, at_5])
        assert grad.tolist() == pytest.approx([1 - math.e, slope])


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
    slow = [ref.KL_ESTIMATORS[name](x) for x in (new - base).tolist()]
    assert kl_estimate(name, new, base).tolist() == pytest.approx(slow, rel=1e-9, abs=1e-12)


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


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match=r"'k4\+': expected one of kl, k1"):
        kl_estimate("k4+", *at([0.0]))
    with pytest.raises(ValueError, match="kl_ctrl.type='pid': expected one of fixed, adaptive"):
        make_kl_controller("pid", kl_coef=0.1)
    with pytest.raises(ValueError, match="target_kl=0"):
        make_kl_controller("adaptive", kl_coef=0.1, target_kl=0)
