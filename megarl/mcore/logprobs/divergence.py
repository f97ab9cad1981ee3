"""A divergence of the policy from its teachers over the whole vocabulary, without storing all logits.

A teacher is given by its last hidden states of the policy's tokens and by its head.  Each token has at most one
teacher; teachers may have different hidden sizes.  The vocabulary is sharded over ranks as the policy's, whatever
layout computed a teacher's states.

As in `fused.py`, chunks of logits of both models are computed, used and discarded, twice in the forward pass (first for
the two normalisers, then for the divergence) and once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algo.divergences import Divergence
from megarl.mcore.logprobs import token_statistics as ts
from megarl.mcore.logprobs.fused import Chunk, Chunks, Job, all_tokens, gradients_of, sum_over_ranks
from megarl.mcore.logprobs.fused_torch import blocks, scaled


@dataclass(frozen=True)
class TeacherStates:
    """What teachers say of a row's tokens."""

    teacher: Tensor  # [T] integers, of each token: 1 for the first teacher, 2 for the next, ...; 0: none
    hidden: Tensor  # [T, H], its last hidden states; H of the widest teacher, narrower ones stand at the left
    heads: Sequence[Tensor]  # of each teacher [V/tp, its H], real rows and padding as the policy's; any device


def divergence_of_chunks(
    job: Job, divergence: Divergence, hidden: Tensor, weight: Tensor, teachers: TeacherStates
) -> Tensor:
    """hidden [T, H] (its part of T under sequence parallelism), weight [V/tp, H] of the policy -> [T] float32.

    0 for tokens without a teacher.  Both softmaxes are of logits / temperature over the policy's true vocabulary.
    Differentiable in hidden and weight, whose gradient goes to its `main_grad` if Megatron gave it one.
    """
    column: Tensor = _Divergence.apply(
        job, divergence, hidden, weight, teachers.teacher, teachers.hidden, *teachers.heads
    )
    return column


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        job: Job,
        divergence: Divergence,
        hidden: Tensor,
        weight: Tensor,
        teacher: Tensor,
        states: Tensor,
        *heads: Tensor,
    ) -> Tensor:
        whole = all_tokens(hidden, job, weight)
        found = ts.empty_statistics(len(teacher), whole)
        for at, sides, chunks in _lots(job, whole, weight, teacher, states, heads):
            for chunk in chunks.of(sides, torch.full_like(at, -1), at):
                how = (chunk.index, chunk.num_real, job.temperature, ())
                found[:, at] = ts.merged(found[:, at], chunk.kernels.statistics(chunk.logits, chunk.ref_logits, *how))
                del chunk  # else the next group's buffers are made beside these
        ts.all_reduce_(found, job.group)
        log_z = torch.stack([found[ts.MAX] + found[ts.SUM].log(), found[ts.REF_MAX] + found[ts.REF_SUM].log()])

        sums = torch.zeros_like(log_z)  # of the values and of the pulls
        for at, sides, chunks in _lots(job, whole, weight, teacher, states, heads):
            for chunk in chunks.of(sides, torch.full_like(at, -1), at):
                for block in blocks(chunk.logits):
                    terms = divergence(*_log_probs(job, chunk, block, log_z[:, at]))
                    sums[:, at[block]] += torch.stack([term.sum(-1) for term in terms])
                del chunk
        if job.group.size() > 1:
            dist.all_reduce(sums, group=job.group)
        ctx.job, ctx.divergence = job, divergence
        ctx.save_for_backward(hidden, weight, teacher, states, log_z, sums[1], *heads)
        return sums[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, teacher, states, log_z, pulls, *heads = ctx.saved_tensors
        job: Job = ctx.job
        whole, taught = all_tokens(hidden, job, weight), teacher.masked_fill(grad == 0, 0)
        gradients = gradients_of(job, whole, weight, log_z.dtype, learns_weight=ctx.needs_input_grad[3])
        for at, sides, chunks in _lots(job, whole, weight, taught, states, heads):
            with gradients.of_lot(at, sides[0]) as add:
                for chunk in chunks.of(sides, torch.full_like(at, -1), at):
                    for block in blocks(chunk.logits):
                        log_p, log_q = _log_probs(job, chunk, block, log_z[:, at])
                        pull = ctx.divergence(log_p, log_q)[1]
                        of_logits = (pull - log_p.exp() * pulls[at[block], None]) * (
                            grad[at[block], None] / job.temperature
                        )
                        chunk.logits[block, : chunk.num_real] = of_logits
                    chunk.logits[:, chunk.num_real :] = 0.0
                    add(chunk.rows, chunk.logits)
                    del chunk
        own = sum_over_ranks(gradients.of_hidden, job) if ctx.needs_input_grad[2] else None
        return None, None, own, gradients.of_weight(), None, None, *(None,) * len(heads)


def _lots(
    job: Job, hidden: Tensor, weight: Tensor, teacher: Tensor, states: Tensor, heads: Sequence[Tensor]
) -> Iterator[tuple[Tensor, list[Tensor], Chunks]]:
    """(indices of tokens of one teacher, [the policy's hidden states, the teacher's], their chunks) in groups."""
    for number, head in enumerate(heads, 1):
        tokens = (teacher == number).nonzero().squeeze(1)
        if len(tokens):
            chunks = Chunks(job, weight, head.to(weight.device, weight.dtype))
            theirs = states[:, : head.size(1)].to(weight.device, weight.dtype)
            yield from ((at, sides, chunks) for at, sides in chunks.lots(hidden, theirs, tokens))


def _log_probs(job: Job, chunk: Chunk, block: slice, log_z: Tensor) -> tuple[Tensor, Tensor]:
    """(log p, log q) of a block of a chunk's tokens over its real rows of the vocabulary; log_z [2, C] of both."""
    assert chunk.ref_logits is not None, "a teacher has a head"
    log_p = scaled(chunk.logits[block], chunk.num_real, job.temperature).sub_(log_z[0, block, None])
    log_q = scaled(chunk.ref_logits[block], chunk.num_real, job.temperature).sub_(log_z[1, block, None])
    return log_p, log_q
