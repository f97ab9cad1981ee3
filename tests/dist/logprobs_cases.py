"""What the ranks of test_logprobs_dist.py run: each evaluates its part of the vocabulary, a chunk at a time."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from megarl.layout import Layout
from megarl.mcore.logprobs import fused
from megarl.mcore.logprobs.fused import Job, columns_of_chunks
from megarl.mcore.setup import destroy_groups, make_groups

NAMES = ("log_probs", "entropy", "sum_pi_squared", "full_kl")


def parts(
    sides: list[Tensor], reference: list[Tensor], labels_of: dict[int, Tensor], factors: Tensor, sequence_parallel: bool
) -> dict[int, list[Tensor]]:
    """Of each vocabulary size: the columns [4, T], and the gradients of the hidden states (of this rank's tokens under
    sequence parallelism) and of this rank's half of the weight."""
    rank_info = make_groups(Layout(tp=2, sequence_parallel=sequence_parallel))
    found = {}
    try:
        for vocab_size, labels in labels_of.items():
            hidden, weight = (side.chunk(2)[rank_info.rank].clone() for side in sides)
            ref_hidden, ref_weight = (side.chunk(2)[rank_info.rank] for side in reference)
            if not sequence_parallel:
                hidden, ref_hidden = sides[0].clone(), reference[0]
            own = [hidden.requires_grad_(), weight.requires_grad_()]
            job = Job(NAMES, vocab_size, 0.8, sequence_parallel)
            with mock.patch.multiple(fused, CHUNK_ELEMENTS=64, CHUNK_TOKENS=7):
                columns = columns_of_chunks(job, *own, labels, ref_hidden, ref_weight)
                stacked = torch.stack([columns[name] for name in NAMES])
                gradients = torch.autograd.grad((stacked * factors).sum(), own)
            found[vocab_size] = [stacked.detach(), *gradients]
    finally:
        destroy_groups()
    return found


def number_of_all_reduces(num_tokens: int) -> tuple[int, int]:
    """Forwards and backwards, for a row of many chunks."""
    make_groups(Layout(tp=2))
    try:
        hidden, weight = torch.randn(num_tokens, 3, requires_grad=True), torch.randn(24, 3)
        labels = torch.zeros(num_tokens, dtype=torch.int64)
        stock = torch.distributed.all_reduce
        with (
            mock.patch.multiple(fused, CHUNK_ELEMENTS=64, CHUNK_TOKENS=4),
            mock.patch("torch.distributed.all_reduce", side_effect=stock) as calls,
        ):
            column = columns_of_chunks(Job(("log_probs", "entropy"), 40), hidden, weight, labels)["entropy"]
            forwards = calls.call_count
            column.sum().backward()
            return forwards, calls.call_count - forwards
    finally:
        destroy_groups()
