"""Log-probabilities and entropy from vocabulary-parallel logits, forward and backward in one pass each.

Megatron's own cross entropy overwrites fp32 logits (cross_entropy:50), and its fused one rounds gradients to bf16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor


class _LogProbEntropy(torch.autograd.Function):
    """log p(label) and H = -sum_v p log p, with one MAX and one SUM all-reduce over the tensor group."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        own_size = logits.size(-1)
        x = logits.float()
        largest = x.amax(-1)
        if group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        x = x - largest[:, None]
        e = x.exp()
        index = labels - group.rank() * own_size
        is_own = (index >= 0) & (index < own_size)
        index = index.clamp(0, own_size - 1)
        chosen = torch.where(is_own, x.gather(-1, index[:, None]).squeeze(-1), 0.0)
        # A logit of -inf (vocabulary padding) has e = 0; 0 * -inf must count as 0.
        sums = torch.stack([e.sum(-1), torch.where(e > 0, e * x, 0.0).sum(-1), chosen])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_z = sums[0].log()
        p, entropy = e / sums[0][:, None], log_z - sums[1] / sums[0]
        ctx.save_for_backward(p, x - log_z[:, None], entropy, index, is_own)
        ctx.dtype = logits.dtype
        return sums[2] - log_z, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None]:
        # d log p(y)/dz_v = [v = y] - p_v          dH/dz_v = -p_v (log p_v + H)
        p, log_p, entropy, index, is_own = ctx.saved_tensors
        by_entropy = torch.where(p > 0, log_p + entropy[:, None], 0.0)
        grad = -p * (grad_log_prob[:, None] + grad_entropy[:, None] * by_entropy)
        grad.scatter_add_(-1, index[:, None], (grad_log_prob * is_own)[:, None])
        return grad.to(ctx.dtype), None, None


def log_probs_and_entropy(logits: Tensor, labels: Tensor, *, vocab_size: int) -> tuple[Tensor, Tensor]:
    """logits [T, V/tp] of this rank (already divided by the temperature), labels [T] -> ([T], [T]) float32.

    `vocab_size` is the model's true one: the rows that pad the vocabulary have no probability.
    """
    group = ps.get_tensor_model_parallel_group()
    first, size = group.rank() * logits.size(-1), logits.size(-1)
    if first + size > vocab_size:
        ids = torch.arange(first, first + size, device=logits.device)
        logits = logits.masked_fill(ids >= vocab_size, float("-inf"))
    return _LogProbEntropy.apply(logits, labels, group)
