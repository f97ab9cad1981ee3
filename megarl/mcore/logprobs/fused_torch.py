"""Statistics and gradient of a chunk of logits in plain torch operations, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megarl.mcore.logprobs import token_statistics as ts

# Elements processed at a time in float32: what fits a CPU core's cache, and what keeps a GPU busy.
BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**22}


def statistics(
    logits: Tensor, ref_logits: Tensor | None, index: Tensor, num_real: int, temperature: float, names: Sequence[str]
) -> Tensor:
    """logits [C, W], of which the first `num_real` columns count; index [C] of the labels, -1 if they are elsewhere
    -> [NUM_STATISTICS, C] of this part of the vocabulary, as far as the columns `names` need them."""
    found = ts.empty_statistics(len(logits), logits)
    for at in blocks(logits):
        x = scaled(logits[at], num_real, temperature)
        chosen = x.gather(-1, index[at, None].clamp(min=0)).squeeze(-1)
        found[ts.LABEL, at] = torch.where(index[at] >= 0, chosen, 0.0)
        found[ts.MAX, at] = x.amax(-1)
        x -= found[ts.MAX, at, None]
        e = x.exp()
        found[ts.SUM, at] = e.sum(-1)
        if "entropy" in names:
            found[ts.X_SUM, at] = (e * x).sum(-1)
        if "sum_pi_squared" in names:
            found[ts.SQUARES, at] = e.square().sum(-1)
        if ref_logits is not None:
            y = scaled(ref_logits[at], num_real, temperature)
            found[ts.REF_MAX, at] = y.amax(-1)
            y -= found[ts.REF_MAX, at, None]
            found[ts.DIFF, at] = (e * x.sub_(y)).sum(-1)
            found[ts.REF_SUM, at] = y.exp_().sum(-1)
    return found


def gradient_(
    logits: Tensor, ref_logits: Tensor | None, index: Tensor, factors: Tensor, num_real: int, temperature: float
) -> None:
    """Overwrite logits [C, W] with d loss/d logits; 0 in the padding columns."""
    for at in blocks(logits):
        own = factors[:, at, None]
        log_p = scaled(logits[at], num_real, temperature).sub_(own[ts.LOG_Z])
        inner = own[ts.OF_LOG_P] * log_p
        if ref_logits is not None:
            log_q = scaled(ref_logits[at], num_real, temperature).sub_(own[ts.REF_LOG_Z])
            inner += own[ts.OF_LOG_RATIO] * (log_p - log_q)
        p = log_p.exp_()
        grad = inner.add_(own[ts.OF_P_SQUARED] * p).add_(own[ts.OF_P]).mul_(p)
        of_label = torch.where(index[at, None] >= 0, own[ts.OF_LABEL], 0.0)
        grad.scatter_add_(-1, index[at, None].clamp(min=0), of_label)
        logits[at, :num_real] = grad.div_(temperature)
    logits[:, num_real:] = 0.0


def blocks(logits: Tensor) -> Iterator[slice]:
    """Runs of rows of logits [C, W] that are processed at a time."""
    size = max(1, BLOCK_ELEMENTS["cuda" if logits.is_cuda else "cpu"] // logits.size(1))
    return (slice(first, first + size) for first in range(0, len(logits), size))


def scaled(logits: Tensor, num_real: int, temperature: float) -> Tensor:
    """The real columns / temperature: a new tensor in float32 (float64 stays)."""
    x = logits[:, :num_real].to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    return x if temperature == 1.0 else x.div_(temperature)
