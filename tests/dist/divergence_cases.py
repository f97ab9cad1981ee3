"""What the ranks of test_distill_divergence_dist.py run: each evaluates its part of the vocabulary, by chunks."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from megarl.algo.divergences import make_divergence
from megarl.layout import Layout
from megarl.mcore.logprobs import fused
from megarl.mcore.logprobs.divergence import TeacherStates, divergence_of_chunks
from megarl.mcore.logprobs.fused import Job
from megarl.mcore.setup import destroy_groups, make_groups

Key = tuple[str, int]  # a divergence and the size of the vocabulary


def parts(
    keys: list[Key],
    sides: list[Tensor],
    teacher: Tensor,
    states: Tensor,
    heads: list[Tensor],
    factors: Tensor,
    sequence_parallel: bool,
) -> dict[Key, list[Tensor]]:
    """The column [T], and the gradients of the hidden states (of this rank's tokens under sequence parallelism) and of
    this rank's half of the weight."""
    rank = make_groups(Layout(tp=2, sequence_parallel=sequence_parallel)).rank
    found = {}
    try:
        for name, vocab_size in keys:
            hidden, weight = (side.chunk(2)[rank].clone() for side in sides)
            if not sequence_parallel:
                hidden = sides[0].clone()
            own = [hidden.requires_grad_(), weight.requires_grad_()]
            theirs = TeacherStates(teacher, states, [head.chunk(2)[rank] for head in heads])
            job = Job((), vocab_size, 0.8, sequence_parallel)
            with mock.patch.multiple(fused, CHUNK_ELEMENTS=64, CHUNK_TOKENS=7):
                column = divergence_of_chunks(job, make_divergence(name, 0.3), *own, theirs)
                gradients = torch.autograd.grad((column * factors).sum(), own)
            found[name, vocab_size] = [column.detach(), *gradients]
    finally:
        destroy_groups()
    return found
