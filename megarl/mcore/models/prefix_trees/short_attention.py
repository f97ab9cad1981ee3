"""Attention of a few queries to a few keys, by products of all of a call's small matrices at once.

torch's fused attention for CPUs works for each head of each sequence alone, on blocks of at least 32 queries: with
short sequences that is more work than the attention.  All scores are in memory here, which only short sequences allow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Scores are in units of ln 2: torch's powers of two take a third of the time of its powers of e, whose library (MKL's)
# is slower still where a score is minus infinity.
LN2 = math.log(2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [b, n, q, d], k [b, m, k, d], v [b, m, k, e] -> output [b, n, q, e], logarithm of each softmax's sum [b, n, q].

    For n a multiple of m.  mask [b, 1, q, k] bool; a query that sees nothing, which only padding does, gets NaN.
    16-bit numbers are computed in float32.
    """
    shape, (q, k, v) = q.shape[:-1], _matrices(k, q, k, v)
    scores = _scores(q, k, mask, scale)
    largest = scores.amax(-1, keepdim=True)
    of_keys = scores.sub_(largest).exp2_()
    total = of_keys.sum(-1, keepdim=True)
    out = torch.bmm(of_keys, v).div_(total)
    return out.view(*shape, -1), total.log2_().add_(largest).mul_(LN2).view(shape)


def attend_backward(
    grad: Tensor, out: Tensor, sums: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their shapes, as parts of a softmax with this output and log of the sum."""
    shapes = q.shape, k.shape, v.shape
    q, k, v, grad, out, sums = _matrices(k, q, k, v, grad, out, sums[..., None])
    p = _scores(q, k, mask, scale).sub_(sums / LN2).exp2_()
    inner = (grad * out).sum(-1, keepdim=True)
    of_scores = torch.bmm(grad, v.mT).sub_(inner).mul_(p).mul_(scale)
    of_q, of_k, of_v = torch.bmm(of_scores, k), torch.bmm(of_scores.mT, q), torch.bmm(p.mT, grad)
    return of_q.view(shapes[0]), of_k.view(shapes[1]), of_v.view(shapes[2])


def _matrices(k: Tensor, *parts: Tensor) -> list[Tensor]:
    """[b * m, queries or keys, ...]: the queries of all heads that have the same keys are one below the other."""
    wide = torch.promote_types(k.dtype, torch.float32)
    return [x.to(wide).reshape(k.size(0) * k.size(1), -1, x.size(-1)) for x in parts]


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[b * m, queries, keys] in units of ln 2, -inf where a query does not see a key."""
    scores = torch.bmm(q, k.mT).mul_(scale / LN2)
    hidden = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    scores.view(len(mask), -1, *mask.shape[2:]).add_(hidden)
    return scores
