"""Columns of chunks of logits, against whole logits and log_softmax in float64."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from logprobs_plain import (
    ALL,
    Case,
    cases,
    chunks_of,
    fused_columns,
    gradients,
    logits_as,
    plain_columns,
    total,
)
from readme_blocks import ROOT, blocks
from torch import Tensor

from megarl.mcore.logprobs import fused, fused_torch
from megarl.mcore.logprobs import token_statistics as ts
from megarl.mcore.logprobs.fused import Job, columns_of_chunks


def test_the_entropy_is_that_of_the_documents() -> None:
    page = (ROOT / "tests/fixtures/source_documents/python_blocks.md").read_text()
    space: dict[str, Any] = {"torch": torch}
    exec(next(block.text for block in blocks(page) if block.file == "entropy_from_logits"), space)
    logits = 3 * torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    found = fused_columns(*logits_as(logits), torch.zeros(7, dtype=torch.int64), 11)["entropy"]
    torch.testing.assert_close(found, space["entropy_from_logits"](logits))


@given(cases())
def test_values_and_gradients_are_those_of_log_softmax(case: Case) -> None:
    g = case.generator
    hidden, weight = case.sides(g)
    sides = [(2 * hidden).requires_grad_(), weight.requires_grad_()]
    ref_hidden, ref_weight = case.sides(g, width=4)
    reference = [3 * ref_hidden, 3 * ref_weight]
    labels = torch.randint(0, case.vocab_size, (case.num_tokens,), generator=g)
    factors = torch.randn(4, case.num_tokens, generator=g).to(case.dtype)
    expected = plain_columns(*sides, labels, case.vocab_size, case.temperature, reference)
    with chunks_of(*case.chunk):
        got = fused_columns(*sides, labels, case.vocab_size, case.temperature, reference)
        found = gradients(got, factors, *sides)
    for name in ALL:
        assert got[name].dtype is case.dtype
        torch.testing.assert_close(got[name].double(), expected[name], atol=case.close, rtol=case.close)
    case.check_gradients(found, gradients(expected, factors, *sides), [*expected.values()])


@pytest.mark.parametrize("name", ALL)
def test_a_column_alone_is_that_of_all_together(name: str) -> None:
    g = torch.Generator().manual_seed(4)
    sides = [torch.randn(n, 3, generator=g, requires_grad=True) for n in (6, 16)]
    reference = [torch.randn(n, 3, generator=g) for n in (6, 16)]
    labels = torch.arange(6)
    alone = columns_of_chunks(Job((name,), 13, 0.9), *sides, labels, *reference)
    assert list(alone) == [name]
    every = fused_columns(*sides, labels, 13, 0.9, reference)
    assert torch.equal(alone[name], every[name])
    for one, other in zip(
        torch.autograd.grad(alone[name].sum(), sides), torch.autograd.grad(every[name].sum(), sides), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-6)


def test_sums_that_nobody_asked_for_are_not_made() -> None:
    logits, index = torch.randn(2, 8), torch.tensor([1, 2])
    found = fused_torch.statistics(logits, None, index, 8, 1.0, ("log_probs",))
    assert not found[[ts.X_SUM, ts.SQUARES, ts.REF_SUM, ts.DIFF]].any()


@pytest.mark.parametrize("elements", [8, 2**26])  # 8: a chunk holds the largest logit, or none near it
def test_large_logits_stay_finite_and_entropy_near_zero_is_not_negative(elements: int) -> None:
    logits = torch.full((3, 24), -3e4)
    logits[0, :2], logits[2, 20] = torch.tensor([1e4, -1e4]), 3e4
    sides = [side.requires_grad_() for side in logits_as(logits)]
    with chunks_of(elements, 100):
        found = fused_columns(*sides, torch.tensor([0, 1, 20]), 24, reference=logits_as(logits.flip(0)))
        slopes = gradients(found, torch.ones(4, 3), *sides)
    assert found["log_probs"].tolist() == pytest.approx([0.0, -math.log(24), 0.0], abs=1e-6)
    assert found["entropy"].tolist() == pytest.approx([0.0, math.log(24), 0.0], abs=1e-6)
    assert found["entropy"].min() >= 0
    assert found["sum_pi_squared"].tolist() == pytest.approx([1.0, 1 / 24, 1.0])
    assert found["full_kl"].tolist() == pytest.approx([6e4, 0.0, 4e4], abs=1e-2)
    assert all(slope.isfinite().all() for slope in slopes)


def test_bf16_gives_float32_columns_and_bf16_gradients() -> None:
    g = torch.Generator().manual_seed(0)
    sides = [torch.randn(n, 8, generator=g).bfloat16().requires_grad_() for n in (5, 12)]
    labels, factors = torch.tensor([0, 3, 11, 5, 7]), torch.ones(3, 5)
    got = fused_columns(*sides, labels, 12, 0.7)
    logits = [(sides[0] @ sides[1].T).detach().float()]  # the matrix product is rounded to bf16, nothing after it is
    rounded = plain_columns(*logits_as(logits[0]), labels, 12, 0.7)
    expected = plain_columns(*sides, labels, 12, 0.7)
    for name in ALL[:3]:
        assert got[name].dtype is torch.float32
        torch.testing.assert_close(got[name].double(), rounded[name], atol=3e-6, rtol=0)
    for ours, theirs in zip(gradients(got, factors, *sides), gradients(expected, factors, *sides), strict=True):
        assert ours.dtype is torch.bfloat16
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def test_a_token_that_no_gradient_reaches_is_not_computed_again() -> None:
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(6, 4, generator=g), torch.randn(16, 4, generator=g)
    hidden[2] = math.nan  # at a place that the loss masks
    sides = [hidden.requires_grad_(), weight.requires_grad_()]
    log_probs = fused_columns(*sides, torch.zeros(6, dtype=torch.int64), 16)["log_probs"]
    of_hidden, of_weight = torch.autograd.grad(log_probs[[0, 5]].sum(), sides)
    assert of_hidden.isfinite().all()
    assert of_weight.isfinite().all()
    assert of_hidden.any(1).tolist() == [True, False, False, False, False, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("elements", [16, 2**26])
def test_a_logit_that_is_not_finite_shows_in_its_token_alone(bad: float, elements: int) -> None:
    with chunks_of(elements, 2):
        found = fused_columns(torch.tensor([[0.0], [bad], [0.0]]), torch.ones(24, 1), torch.tensor([0, 5, 7]), 24)
    for name in ("log_probs", "entropy"):
        assert found[name].isfinite().tolist() == [True, False, True]


def test_frozen_weights_get_no_gradient() -> None:
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(8, 3)
    weight.main_grad = torch.full((8, 3), math.nan)  # type: ignore[attr-defined]
    fused_columns(hidden, weight, torch.zeros(4, dtype=torch.int64), 8)["log_probs"].sum().backward()
    assert weight.grad is None
    assert weight.main_grad.isnan().all()  # type: ignore[attr-defined]
    assert hidden.grad is not None
    assert hidden.grad.any()


@contextmanager
def logits_in_float32() -> Iterator[None]:
    """As on a GPU: 16-bit factors, a product in float32."""

    def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        return out.copy_(left.float() @ right.float())

    with (
        mock.patch.object(fused, "_logits_dtype", lambda hidden: torch.float32),
        mock.patch.object(fused, "_product", product),
    ):
        yield


@pytest.mark.parametrize("has_main_grad", [False, True])
def test_logits_in_float32_give_closer_columns_and_gradients_of_a_16_bit_model(has_main_grad: bool) -> None:
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(12, 64, generator=g).bfloat16().requires_grad_()
    weight: Any = (2 * torch.randn(40, 64, generator=g)).bfloat16().requires_grad_()
    reference = (hidden.detach() * 0.75, weight.detach())
    labels, factors = torch.randint(0, 37, (12,), generator=g), torch.randn(4, 12, generator=g)
    exact = plain_columns(hidden, weight, labels, 37, reference=reference)
    wanted = gradients(exact, factors, hidden, weight)

    def errors() -> tuple[float, float]:
        """Largest error of the columns, and that of the gradients relative to the largest gradient."""
        if has_main_grad:
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(40, 64), False
        with chunks_of(elements=160, tokens=5):
            columns = fused_columns(hidden, weight, labels, 37, reference=reference)
            hidden.grad = weight.grad = None
            total(columns, factors).backward()
        found = hidden.grad, weight.main_grad if has_main_grad else weight.grad
        off = max(float((columns[name].double() - exact[name]).abs().max()) for name in ALL)
        pairs = zip(found, wanted, strict=True)
        return off, max(float((x.double() - y.double()).abs().max() / y.double().abs().max()) for x, y in pairs)

    rounded = errors()
    with logits_in_float32():
        closer = errors()
    assert closer[0] < 1e-4 < 1e-2 < rounded[0]
    assert closer[1] < rounded[1] < 0.02  # both round the logits' gradient to 16 bits


def test_logits_have_the_models_dtype_on_a_cpu() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert fused._logits_dtype(torch.empty(1, dtype=dtype)) is dtype
