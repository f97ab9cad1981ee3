"""The log-probs of a few tokens at each place, from hidden states and head, without storing all logits.

`top_k_of_chunks` finds the most likely tokens of a teacher; `log_probs_of_ids` gives the policy's log-probs of given
tokens, differentiable.  The vocabulary is sharded over ranks, and computed in the chunks of `fused.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algo.distillation import NO_LOG_PROB
from megarl.mcore.logprobs import token_statistics as ts
from megarl.mcore.logprobs.fused import Chunk, Chunks, Job, all_tokens, gradients_of, sum_over_ranks
from megarl.mcore.logprobs.fused_torch import blocks, scaled


@torch.no_grad()
def top_k_of_chunks(job: Job, hidden: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """hidden [T, H] (its part of T under sequence parallelism), weight [V/tp, H] -> (ids [T, k], log-probs [T, k]).

    Most likely first, of softmax(logits / temperature) over the true vocabulary, which has at least k tokens.  On every
    rank of the vocabulary.
    """
    whole, chunks = all_tokens(hidden, job, weight), Chunks(job, weight, None)
    first = job.group.rank() * len(weight)
    found = ts.empty_statistics(len(whole), whole)
    best = torch.full((len(whole), k), torch.finfo(found.dtype).min, dtype=found.dtype, device=whole.device)
    ids = torch.full_like(best, -1, dtype=torch.int64)
    for at, sides in chunks.lots(whole, None):
        for chunk in chunks.of(sides, torch.full_like(at, -1), at):
            how = (chunk.index, chunk.num_real, job.temperature, ())
            found[:, at] = ts.merged(found[:, at], chunk.kernels.statistics(chunk.logits, None, *how))
            for block in blocks(chunk.logits):
                x = scaled(chunk.logits[block], chunk.num_real, job.temperature)
                theirs = torch.arange(first + chunk.rows.start, first + chunk.rows.start + x.size(1), device=x.device)
                of_block = at[block]
                best[of_block], ids[of_block] = _best(
                    torch.cat([best[of_block], x], 1), torch.cat([ids[of_block], theirs.expand(len(x), -1)], 1), k
                )
            del chunk  # else the next group's buffer is made beside this one
    ts.all_reduce_(found, job.group)
    if job.group.size() > 1:
        parts = [[torch.empty_like(x) for _ in range(job.group.size())] for x in (best, ids)]
        for gathered, own in zip(parts, (best, ids), strict=True):
            dist.all_gather(gathered, own, group=job.group)
        best, ids = _best(torch.cat(parts[0], 1), torch.cat(parts[1], 1), k)
    return ids, best - (found[ts.MAX] + found[ts.SUM].log())[:, None]


def log_probs_of_ids(job: Job, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """hidden [T, H] (its part of T under sequence parallelism), weight [V/tp, H], ids [T, K] -> [T, K] float32.

    Log-probs of these tokens, NO_LOG_PROB where the id is -1.  Differentiable in hidden and weight, whose gradient goes
    to its `main_grad` if Megatron gave it one.
    """
    column: Tensor = _OfIds.apply(job, hidden, weight, ids.long())  # they travel as int32; indices are int64
    return column


class _OfIds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: Job, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        whole, chunks = all_tokens(hidden, job, weight), Chunks(job, weight, None)
        tokens = (ids >= 0).any(1).nonzero().squeeze(1)
        index = ids - job.group.rank() * len(weight)
        found = ts.empty_statistics(len(ids), whole)
        chosen = torch.zeros(ids.shape, dtype=found.dtype, device=whole.device)
        for at, sides in chunks.lots(whole, None, tokens):
            for chunk in chunks.of(sides, torch.full_like(at, -1), at):
                how = (chunk.index, chunk.num_real, job.temperature, ())
                found[:, at] = ts.merged(found[:, at], chunk.kernels.statistics(chunk.logits, None, *how))
                column, is_here = _columns(chunk, index[at])
                x = chunk.logits.gather(1, column).to(found.dtype) / job.temperature
                chosen[at] += torch.where(is_here, x, 0.0)
                del chunk  # else the next group's buffer is made beside this one
        ts.all_reduce_(found, job.group)
        if job.group.size() > 1:
            dist.all_reduce(chosen, group=job.group)
        log_z = found[ts.MAX] + found[ts.SUM].log()
        ctx.job = job
        ctx.save_for_backward(hidden, weight, index, tokens, log_z, ids >= 0)
        return torch.where(ids >= 0, chosen - log_z[:, None], NO_LOG_PROB)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, index, tokens, log_z, is_token = ctx.saved_tensors
        job: Job = ctx.job
        whole, chunks = all_tokens(hidden, job, weight), Chunks(job, weight, None)
        grad = torch.where(is_token, grad, 0.0) / job.temperature
        total = grad.sum(1)
        gradients = gradients_of(job, whole, weight, log_z.dtype, learns_weight=ctx.needs_input_grad[2])
        for at, sides in chunks.lots(whole, None, tokens[(grad[tokens] != 0).any(1)]):
            with gradients.of_lot(at, sides[0]) as add:
                for chunk in chunks.of(sides, torch.full_like(at, -1), at):
                    column, is_here = _columns(chunk, index[at])
                    for block in blocks(chunk.logits):
                        p = scaled(chunk.logits[block], chunk.num_real, job.temperature)
                        p = p.sub_(log_z[at[block], None]).exp_()
                        of_logits = p.mul_(-total[at[block], None])
                        of_ids = torch.where(is_here[block], grad[at[block]], 0.0)
                        chunk.logits[block, : chunk.num_real] = of_logits.scatter_add_(1, column[block], of_ids)
                    chunk.logits[:, chunk.num_real :] = 0.0
                    add(chunk.rows, chunk.logits)
                    del chunk
        of_hidden = sum_over_ranks(gradients.of_hidden, job) if ctx.needs_input_grad[1] else None
        return None, of_hidden, gradients.of_weight(), None


def _columns(chunk: Chunk, index: Tensor) -> tuple[Tensor, Tensor]:
    """index [C, K] in this rank's rows -> (columns of the chunk, 0 for those elsewhere; whether they are in it)."""
    column = index - chunk.rows.start
    is_here = (column >= 0) & (column < chunk.num_real)
    return torch.where(is_here, column, 0), is_here


def _best(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, and their ids."""
    found, places = values.topk(k, 1)
    return found, ids.gather(1, places)
