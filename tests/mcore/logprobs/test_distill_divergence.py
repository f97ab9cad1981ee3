"""The divergence from teachers in chunks of logits, against whole logits in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from divergence_plain import plain_divergence
from hypothesis import given
from hypothesis import strategies as st
from logprobs_plain import Case, cases, chunks_of, logits_as
from torch import Tensor

from megarl.algo.divergences import make_divergence
from megarl.mcore.logprobs.divergence import TeacherStates, divergence_of_chunks
from megarl.mcore.logprobs.fused import Job

pytestmark = pytest.mark.usefixtures("one_rank")
NAMES = ("reverse_kl", "forward_kl", "jsd")
BETA = 0.3


def in_chunks(
    name: str,
    hidden: Tensor,
    weight: Tensor,
    teacher: Tensor,
    states: Tensor,
    heads: Sequence[Tensor],
    vocab_size: int,
    temperature: float = 1.0,
) -> Tensor:
    job = Job((), vocab_size, temperature)
    return divergence_of_chunks(job, make_divergence(name, BETA), hidden, weight, TeacherStates(teacher, states, heads))


def test_two_tokens_by_hand() -> None:
    hidden, weight = logits_as(torch.tensor([[math.log(3), 0.0, -1e4], [0.0, 0.0, 0.0]]))
    states, head = logits_as(torch.tensor([[0.0, 0.0, -1e4], [math.log(2), 0.0, 0.0]]))
    teacher = torch.tensor([1, 1])
    half = math.log(2)
    by_hand = {
        "reverse_kl": [0.75 * math.log(1.5) - 0.25 * half, (math.log(2 / 3) + 2 * math.log(4 / 3)) / 3],
        "forward_kl": [0.5 * math.log(2 / 3) + 0.5 * half, 0.5 * math.log(1.5) + 0.5 * math.log(0.75)],
    }
    for name, expected in by_hand.items():
        found = in_chunks(name, hidden, weight, teacher, states, [head], 3)
        assert found.tolist() == pytest.approx(expected, abs=1e-6), name


@given(cases(), st.sampled_from(NAMES))
def test_values_and_gradients_are_those_of_whole_logits(case: Case, name: str) -> None:
    """Two teachers of other sizes than the policy; some tokens have none."""
    g = case.generator
    hidden, weight = case.sides(g)
    sides = [(2 * hidden).requires_grad_(), weight.requires_grad_()]
    heads = [torch.randn(len(weight), width, generator=g).to(case.dtype) for width in (3, 7)]
    states = 2 * torch.randn(case.num_tokens, 7, generator=g).to(case.dtype)
    teacher = torch.randint(0, 3, (case.num_tokens,), generator=g)
    factors = torch.randn(case.num_tokens, generator=g).to(case.dtype)
    how = (*sides, teacher, states, heads, case.vocab_size, case.temperature)
    expected = plain_divergence(name, BETA, *how)
    with chunks_of(*case.chunk):
        got = in_chunks(name, *how)
        found = torch.autograd.grad((got * factors).sum(), sides)
    assert got.dtype is case.dtype
    assert not got[teacher == 0].any()
    torch.testing.assert_close(got.double(), expected.detach(), atol=case.close, rtol=case.close)
    if teacher.any():
        theirs = torch.autograd.grad((expected * factors).sum(), sides)
    else:
        theirs = tuple(torch.zeros_like(side) for side in sides)
    case.check_gradients(found, theirs, [expected])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_differences(name: str) -> None:
    g = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 3, generator=g, dtype=torch.float64, requires_grad=True) for n in (5, 11))
    states, head = (torch.randn(n, 2, generator=g, dtype=torch.float64) for n in (5, 11))
    teacher = torch.tensor([1, 0, 1, 1, 1])
    with chunks_of(16, 2):
        assert torch.autograd.gradcheck(
            lambda *sides: in_chunks(name, *sides, teacher, states, [head], 9, 0.7), (hidden, weight)
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_teacher_that_is_the_policy_pulls_nowhere(name: str) -> None:
    g = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 4, generator=g, requires_grad=True) for n in (6, 24))
    teacher = torch.ones(6, dtype=torch.int64)
    found = in_chunks(name, hidden, weight, teacher, hidden.detach(), [weight.detach()], 20)
    assert found.abs().max() < 1e-6
    for gradient in torch.autograd.grad(found.sum(), (hidden, weight)):
        assert gradient.abs().max() < 1e-6


def test_a_frozen_head_gets_no_gradient() -> None:
    """As under adapters."""
    g = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(3, 4, generator=g, requires_grad=True), torch.randn(8, 4, generator=g)
    states, head = torch.randn(3, 2, generator=g), torch.randn(8, 2, generator=g)
    in_chunks("jsd", hidden, weight, torch.ones(3, dtype=torch.int64), states, [head], 8).sum().backward()
    assert hidden.grad is not None and hidden.grad.any()
    assert weight.grad is None
