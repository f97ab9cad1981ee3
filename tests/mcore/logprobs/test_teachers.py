"""What teachers need in chunks of logits, against whole logits in float64: divergences, top tokens, given tokens."""

from collections.abc import Sequence

import pytest
import torch
from divergence_plain import plain_divergence
from hypothesis import given
from hypothesis import strategies as st
from logprobs_plain import Case, cases, chunks_of, logits_as
from torch import Tensor

from megarl.algo.distillation import NO_LOG_PROB
from megarl.algo.divergences import DIVERGENCES, make_divergence
from megarl.mcore.logprobs.divergence import TeacherStates, divergence_of_chunks
from megarl.mcore.logprobs.fused import Job
from megarl.mcore.logprobs.top_k import log_probs_of_ids, top_k_of_chunks

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


@given(cases(), st.sampled_from(tuple(DIVERGENCES)))
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


def test_a_frozen_head_gets_no_gradient() -> None:
    """As under adapters."""
    g = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(3, 4, generator=g, requires_grad=True), torch.randn(8, 4, generator=g)
    states, head = torch.randn(3, 2, generator=g), torch.randn(8, 2, generator=g)
    in_chunks("jsd", hidden, weight, torch.ones(3, dtype=torch.int64), states, [head], 8).sum().backward()
    assert hidden.grad is not None and hidden.grad.any()
    assert weight.grad is None


def plain(hidden: Tensor, weight: Tensor, vocab_size: int, temperature: float) -> Tensor:
    return (hidden.double() @ weight[:vocab_size].double().T / temperature).log_softmax(-1)


@given(cases(smallest=5), st.integers(1, 5))
def test_the_most_likely_tokens_are_those_of_whole_logits(case: Case, k: int) -> None:
    hidden, weight = case.sides(case.generator)
    with chunks_of(*case.chunk):
        ids, log_probs = top_k_of_chunks(Job((), case.vocab_size, case.temperature), hidden, weight, k)
    whole = plain(hidden, weight, case.vocab_size, case.temperature)
    expected = whole.topk(k).values
    torch.testing.assert_close(log_probs.double(), expected, atol=case.close, rtol=case.close)
    torch.testing.assert_close(whole.gather(1, ids), expected, atol=case.close, rtol=case.close)
    assert all(len(set(row)) == k for row in ids.tolist()), "no token twice"


@given(cases(smallest=4))
def test_values_and_gradients_of_given_tokens_are_those_of_log_softmax(case: Case) -> None:
    g = case.generator
    sides = [side.requires_grad_() for side in case.sides(g)]
    ids = torch.stack([torch.randperm(case.vocab_size, generator=g)[:4] for _ in range(case.num_tokens)])
    ids[torch.rand(case.num_tokens, 4, generator=g) < 0.3] = -1
    factors = torch.randn(case.num_tokens, 4, generator=g).to(case.dtype)
    with chunks_of(*case.chunk):
        got = log_probs_of_ids(Job((), case.vocab_size, case.temperature), *sides, ids.int())  # the type that travels
        found = torch.autograd.grad((got * factors).sum(), sides)
    whole = plain(*sides, case.vocab_size, case.temperature).gather(1, ids.clamp(min=0))
    assert (got[ids < 0] == NO_LOG_PROB).all()
    torch.testing.assert_close(got[ids >= 0].double(), whole[ids >= 0].detach(), atol=case.close, rtol=case.close)
    theirs = torch.autograd.grad((torch.where(ids >= 0, whole, 0.0) * factors).sum(), sides)
    case.check_gradients(found, theirs, [whole])


def test_padding_is_never_among_the_most_likely() -> None:
    hidden, weight = logits_as(torch.tensor([[1.0, 3.0, 2.0, 50.0]]))
    ids, log_probs = top_k_of_chunks(Job((), 3), hidden, weight, 3)
    assert ids.tolist() == [[1, 2, 0]]
    assert log_probs.exp().sum().item() == pytest.approx(1.0)
