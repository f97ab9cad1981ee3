"""Log-probabilities and entropy of a whole vocabulary, against log_softmax in float64."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.mcore import logprobs
from megarl.mcore.logprobs import log_probs_and_entropy

pytestmark = pytest.mark.usefixtures("one_rank")


def reference(logits: Tensor, labels: Tensor, vocab_size: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The definition, in float64 and one token after the other."""
    log_probs, entropies = [], []
    for row, label in zip(logits.double()[:, :vocab_size], labels, strict=True):
        log_p = (row / temperature).log_softmax(-1)
        log_probs.append(log_p[label])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(log_probs), torch.stack(entropies)


def gradients(columns: tuple[Tensor, Tensor], logits: Tensor, factors: Tensor) -> Tensor:
    """d/dlogits of the columns, weighted with factors [2, T]."""
    total = sum((column * factor).sum() for column, factor in zip(columns, factors, strict=True))
    return torch.autograd.grad(total, logits)[0]


def test_three_tokens_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(3), 0.0, -1e4, -1e4]])
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([2, 1]), vocab_size=4)
    # Four equal chances; three quarters and one quarter.
    assert log_probs.tolist() == pytest.approx([-math.log(4), -math.log(4)])
    assert entropy.tolist() == pytest.approx([math.log(4), math.log(4) - 0.75 * math.log(3)])


@given(st.integers(1, 7), st.integers(2, 40), st.integers(0, 9), st.sampled_from([1.0, 0.7, 2.0]), st.integers(0, 999))
def test_values_and_gradients_are_those_of_log_softmax(
    num_tokens: int, vocab_size: int, padding: int, temperature: float, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(num_tokens, vocab_size + padding, generator=g)).requires_grad_()
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=g)
    factors = torch.randn(2, num_tokens, generator=g)
    want = reference(logits, labels, vocab_size, temperature)
    with mock.patch.object(logprobs, "CHUNK_ELEMENTS", 64):  # a few tokens at a time
        got = log_probs_and_entropy(logits, labels, vocab_size=vocab_size, temperature=temperature)
        gradient = gradients(got, logits, factors)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours.double(), theirs, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(gradient, gradients(want, logits, factors), atol=3e-6, rtol=1e-5)


def test_rows_that_pad_the_vocabulary_have_no_probability_and_no_gradient() -> None:
    logits = torch.tensor([[1.0, 2.0, 50.0, 60.0]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([1]), vocab_size=2)
    assert log_probs.item() == pytest.approx(-math.log(1 + math.exp(-1)))
    gradient = gradients((log_probs, entropy), logits, torch.ones(2, 1))
    assert gradient[0, 2:].tolist() == [0, 0]
    assert gradient[0, :2].abs().min() > 0


def test_a_label_in_the_last_row_of_the_vocabulary() -> None:
    logits = torch.tensor([[0.0, 0.0, 1.0, 9.0]], requires_grad=True)
    log_probs, _ = log_probs_and_entropy(logits, torch.tensor([2]), vocab_size=3)
    z = 2 + math.e
    assert log_probs.item() == pytest.approx(1 - math.log(z))
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits)
    assert gradient[0].tolist() == pytest.approx([-1 / z, -1 / z, 1 - math.e / z, 0.0])


def test_large_logits_stay_finite_and_are_not_written_to() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e4, -3e4, -3e4]], requires_grad=True)
    before = logits.detach().clone()
    got = log_probs_and_entropy(logits, torch.tensor([0, 1]), vocab_size=3)
    assert got[0].tolist() == pytest.approx([0.0, -math.log(3)])
    assert got[1].tolist() == pytest.approx([0.0, math.log(3)], abs=1e-6)
    assert gradients(got, logits, torch.ones(2, 2)).isfinite().all()
    assert torch.equal(logits.detach(), before)


def test_bf16_logits_give_float32_columns_and_a_bf16_gradient() -> None:
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    labels = torch.tensor([0, 3, 11, 5, 7])
    got = log_probs_and_entropy(logits, labels, vocab_size=12, temperature=0.7)
    want = reference(logits, labels, 12, 0.7)
    torch.testing.assert_close(got[0].double(), want[0], atol=2e-6, rtol=0)
    torch.testing.assert_close(got[1].double(), want[1], atol=2e-6, rtol=0)
    gradient = gradients(got, logits, torch.ones(2, 5))
    assert gradient.dtype is torch.bfloat16
    torch.testing.assert_close(gradient, gradients(want, logits, torch.ones(2, 5)), atol=0, rtol=1e-2)


def test_forward_keeps_nothing_as_large_as_the_logits_but_the_logits() -> None:
    """16384 tokens of a vocabulary of 152k are 10 GB in float32: what autograd keeps decides what fits."""
    kept: list[Tensor] = []
    logits = torch.randn(64, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        log_probs_and_entropy(logits, torch.zeros(64, dtype=torch.int64), vocab_size=120)
    large = [t for t in kept if t.numel() >= 64 * 100]
    assert {t.untyped_storage().data_ptr() for t in large} == {logits.untyped_storage().data_ptr()}
