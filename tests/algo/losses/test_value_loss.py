import algo_reference as ref
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.losses.value import value_loss

D = torch.float64
number = st.floats(-4, 4)


def test_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 2.0, -1.0], dtype=D, requires_grad=True)
    old = torch.tensor([0.8, 1.0, 1.0, 0.0], dtype=D)
    returns = torch.tensor([2.0, 3.0, 1.2, -2.0], dtype=D)
    loss, clipped = value_loss(values, old, returns, cliprange=0.5)
    # inside; clipped to 1.5, error 1.5 > 1; clipped to 1.5, error 0.3 < 0.8; clipped to -0.5, error 1.5 > 1
    assert loss.tolist() == pytest.approx([0.5, 0.5 * 2.25, 0.5 * 0.64, 0.5 * 2.25])
    assert clipped.tolist() == [False, True, False, True]
    loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([-1.0, 0.0, 0.8, 0.0])


@given(st.lists(st.tuples(number, number, number), max_size=5), st.sampled_from([0.2, 0.5, None]))
def test_it_agrees_with_the_slow_reference(tokens: list[tuple[float, float, float]], cliprange: float | None) -> None:
    columns = torch.tensor(tokens, dtype=D).reshape(-1, 3).unbind(1)
    loss, clipped = value_loss(*columns, cliprange=cliprange)
    assert loss.tolist() == pytest.approx([ref.value_token(*token, cliprange) for token in tokens], abs=1e-12)
    assert cliprange is not None or not clipped.any()


def test_rounding_inside_the_range_is_no_clip() -> None:
    g = torch.Generator().manual_seed(0)
    old = torch.randn(10000, generator=g)
    values = old + 0.4 * torch.rand(10000, generator=g)
    assert not value_loss(values, old, torch.randn(10000, generator=g), cliprange=0.5)[1].any()
