"""Log-probabilities and entropy from vocabulary-parallel logits, forward and backward, a few tokens at a time.

16384 tokens of a vocabulary of 152k are 10 GB in float32, and a softmax written down plainly keeps two such tensors and
makes five more.  Here the logits themselves, in the model's type, are all that is kept; the rest lives for a chunk of
tokens.  Megatron's own cross entropy overwrites fp32 logits (cross_entropy:50), and its fused one rounds gradients to
bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

CHUNK_ELEMENTS = 2**25  # logits that are in float32 at a time: 128 MiB


class _LogProbEntropy(torch.autograd.Function):
    """log p(label) and H = -sum_v p log p, with one MAX and one SUM all-reduce over the tensor group.

    logits [T, V/tp]; its first `num_real` columns are the vocabulary, the others pad it.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, num_real: int, temperature: float, group: Any
    ) -> tuple[Tensor, Tensor]:
        index = labels - group.rank() * logits.size(-1)
        is_own = (index >= 0) & (index < num_real)
        index = index.clamp(0, max(0, num_real - 1))
        largest = _largest(logits[:, :num_real], temperature)
        if group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        sums = torch.zeros(3, len(labels), device=logits.device)  # of e^x, of x e^x, and x of the label
        for at, x in _chunks(logits, num_real, temperature, largest):
            e = x.exp()
            chosen = x.gather(-1, index[at, None]).squeeze(-1)
            sums[:, at] = torch.stack([e.sum(-1), (e * x).sum(-1), torch.where(is_own[at], chosen, 0.0)])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_z, entropy = sums[0].log(), sums[0].log() - sums[1] / sums[0]
        ctx.save_for_backward(logits, largest, log_z, entropy, index, is_own)
        ctx.num_real, ctx.temperature = num_real, temperature
        return sums[2] - log_z, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        # d log p(y)/dz_v = [v = y] - p_v          dH/dz_v = -p_v (log p_v + H)
        logits, largest, log_z, entropy, index, is_own = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for at, x in _chunks(logits, ctx.num_real, ctx.temperature, largest):
            log_p = x - log_z[at, None]
            by_entropy = grad_entropy[at, None] * (log_p + entropy[at, None])
            part = -log_p.exp() * (grad_log_prob[at, None] + by_entropy)
            part.scatter_add_(-1, index[at, None], (grad_log_prob[at] * is_own[at])[:, None])
            grad[at, : ctx.num_real] = part / ctx.temperature
        return grad, None, None, None, None


def _largest(logits: Tensor, temperature: float) -> Tensor:
    """[T] float32: the largest logit of this rank's part; -inf where the part is all padding."""
    if logits.size(-1) == 0:
        return torch.full((len(logits),), float("-inf"), device=logits.device)
    return logits.amax(-1).float() / temperature


def _chunks(logits: Tensor, num_real: int, temperature: float, largest: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(tokens, their scaled logits minus the largest one in float32), as many tokens as CHUNK_ELEMENTS allows."""
    if num_real == 0:
        return
    size = max(1, CHUNK_ELEMENTS // num_real)
    for first in range(0, len(logits), size):
        at = slice(first, first + size)
        x = logits[at, :num_real].float()
        yield at, (x if temperature == 1.0 else x / temperature) - largest[at, None]


def log_probs_and_entropy(
    logits: Tensor, labels: Tensor, *, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """logits [T, V/tp] of this rank, labels [T] -> ([T], [T]) float32, of the softmax at this temperature.

    `vocab_size` is the model's true one: the rows that pad the vocabulary have no probability.
    """
    group = ps.get_tensor_model_parallel_group()
    size = logits.size(-1)
    num_real = min(size, max(0, vocab_size - group.rank() * size))
    return _LogProbEntropy.apply(logits, labels, num_real, temperature, group)
