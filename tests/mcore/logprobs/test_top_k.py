"""Log-probs of a few tokens in chunks of logits, against whole logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from logprobs_plain import chunks_of, logits_as
from torch import Tensor

from megarl.algo.distillation import NO_LOG_PROB
from megarl.mcore.logprobs.fused import Job
from megarl.mcore.logprobs.top_k import log_probs_of_ids, top_k_of_chunks

pytestmark = pytest.mark.usefixtures("one_rank")
CHUNKS = st.sampled_from([(64, 3, 40), (17, 100, 1), (2**20, 2, 2**18)])


def plain(hidden: Tensor, weight: Tensor, vocab_size: int, temperature: float) -> Tensor:
    return (hidden.double() @ weight[:vocab_size].double().T / temperature).log_softmax(-1)


@given(
    st.integers(1, 9), st.integers(5, 40), st.integers(0, 9), st.integers(1, 5), st.sampled_from([1.0, 0.7]), CHUNKS,
    st.integers(0, 999),
)  # fmt: skip
def test_the_most_likely_tokens_are_those_of_whole_logits(
    num_tokens: int, vocab_size: int, padding: int, k: int, temperature: float, chunk: tuple[int, int, int], seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 5, generator=g) for n in (num_tokens, vocab_size + padding))
    with chunks_of(*chunk):
        ids, log_probs = top_k_of_chunks(Job((), vocab_size, temperature), hidden, weight, k)
    expected = plain(hidden, weight, vocab_size, temperature).topk(k)
    torch.testing.assert_close(log_probs.double(), expected.values, atol=1e-5, rtol=1e-5)
    whole = plain(hidden, weight, vocab_size, temperature)
    torch.testing.assert_close(whole.gather(1, ids), expected.values, atol=1e-5, rtol=1e-5)
    assert all(len(set(row)) == k for row in ids.tolist()), "no token twice"


@given(
    st.integers(1, 9), st.integers(4, 40), st.integers(0, 9), st.sampled_from([1.0, 0.7]), CHUNKS,
    st.sampled_from([torch.float64, torch.float32]), st.integers(0, 999),
)  # fmt: skip
def test_values_and_gradients_of_given_tokens_are_those_of_log_softmax(
    num_tokens: int,
    vocab_size: int,
    padding: int,
    temperature: float,
    chunk: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    sides = [torch.randn(n, 5, generator=g).to(dtype).requires_grad_() for n in (num_tokens, vocab_size + padding)]
    ids = torch.stack([torch.randperm(vocab_size, generator=g)[:4] for _ in range(num_tokens)])
    ids[torch.rand(num_tokens, 4, generator=g) < 0.3] = -1
    factors = torch.randn(num_tokens, 4, generator=g).to(dtype)
    with chunks_of(*chunk):
        got = log_probs_of_ids(Job((), vocab_size, temperature), *sides, ids.int())  # the type that travels
        found = torch.autograd.grad((got * factors).sum(), sides)
    close = 1e-9 if dtype is torch.float64 else 2e-5
    whole = plain(*sides, vocab_size, temperature).gather(1, ids.clamp(min=0))
    assert (got[ids < 0] == NO_LOG_PROB).all()
    torch.testing.assert_close(got[ids >= 0].double(), whole[ids >= 0].detach(), atol=close, rtol=close)
    theirs = torch.autograd.grad((torch.where(ids >= 0, whole, 0.0) * factors).sum(), sides)
    for ours, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(ours, other, atol=close * max(1.0, other.abs().max().item()), rtol=close)


def test_padding_is_never_among_the_most_likely() -> None:
    hidden, weight = logits_as(torch.tensor([[1.0, 3.0, 2.0, 50.0]]))
    ids, log_probs = top_k_of_chunks(Job((), 3), hidden, weight, 3)
    assert ids.tolist() == [[1, 2, 0]]
    assert log_probs.exp().sum().item() == pytest.approx(1.0)
