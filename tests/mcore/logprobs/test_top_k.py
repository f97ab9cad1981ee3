"""Log-probs of a few tokens in chunks of logits, against whole logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from logprobs_plain import Case, cases, chunks_of, logits_as
from torch import Tensor

from megarl.algo.distillation import NO_LOG_PROB
from megarl.mcore.logprobs.fused import Job
from megarl.mcore.logprobs.top_k import log_probs_of_ids, top_k_of_chunks

pytestmark = pytest.mark.usefixtures("one_rank")


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
