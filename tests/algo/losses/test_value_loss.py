import pytest
import torch

from megarl.algo.losses.value import value_loss

D = torch.float64


def test_by_hand():
    values = torch.tensor([1.0, 2.0, 2.0, -1.0], dtype=D, requires_grad=True)
    old = torch.tensor([0.8, 1.0, 1.0, 0.0], dtype=D)
    returns = torch.tensor([2.0, 3.0, 1.2, -2.0], dtype=D)
    loss, clipped = value_loss(values, old, returns, cliprange=0.5)
    # inside; clipped to 1.5, error 1.5 > 1; clipped to 1.5, error 0.3 < 0.8; clipped to -0.5, error 1.5 > 1
    assert loss.tolist() == pytest.approx([0.5, 0.5 * 2.25, 0.5 * 0.64, 0.5 * 2.25])
    assert clipped.tolist() == [False, True, False, True]
    loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([-1.0, 0.0, 0.8, 0.0])


def test_null_switches_the_clip_off():
    loss, clipped = value_loss(torch.tensor([5.0]), torch.tensor([0.0]), torch.tensor([1.0]), cliprange=None)
    assert (loss.tolist(), clipped.tolist()) == ([8.0], [False])


def test_rounding_inside_the_range_is_no_clip():
    g = torch.Generator().manual_seed(0)
    old = torch.randn(10000, generator=g)
    values = old + 0.4 * torch.rand(10000, generator=g)
    assert not value_loss(values, old, torch.randn(10000, generator=g), cliprange=0.5)[1].any()


def test_gradients_agree_with_finite_differences():
    g = torch.Generator().manual_seed(1)
    values = torch.randn(40, generator=g, dtype=D, requires_grad=True)
    old, returns = torch.randn(40, generator=g, dtype=D), torch.randn(40, generator=g, dtype=D)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, cliprange=0.5)[0], (values,))
