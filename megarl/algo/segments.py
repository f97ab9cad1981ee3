"""Sums, means and last tokens of packed sequences, for all sequences at once.

N tokens of B sequences are concatenated; `segment_ids` [N] is the sequence of each token.  A masked place may hold
any value, including NaN: every function removes it with `where` before it computes, so that it affects neither value
nor gradient (a `where` on the result alone would still give NaN gradients).
"""

from __future__ import annotations

import torch
from torch import Tensor


def count_segments(segment_ids: Tensor) -> int:
    """B, computed as the largest id plus 1."""
    return int(segment_ids.max()) + 1 if len(segment_ids) else 0


def clean(x: Tensor, mask: Tensor) -> Tensor:
    """x [N] with 0 at masked places, at least float32: applied first to every input column."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return torch.where(mask, wide, torch.zeros((), dtype=wide.dtype, device=wide.device))


def segment_sum(x: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """x [N] -> [B], the sum over each sequence."""
    return torch.zeros(num_segments, dtype=x.dtype, device=x.device).index_add(0, segment_ids, x)


def segment_count(mask: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """mask [N] bool -> [B] int64: n_b, the unmasked tokens of each sequence."""
    return segment_sum(mask.to(torch.int64), segment_ids, num_segments)


def segment_mean(x: Tensor, mask: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """x [N] -> [B], the mean over the unmasked tokens of each sequence; 0 for a sequence without such a token."""
    total = segment_sum(clean(x, mask), segment_ids, num_segments)
    return total / segment_count(mask, segment_ids, num_segments).clamp(min=1)


def last_unmasked(mask: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """[B] int64: the flat index of each sequence's last unmasked token, -1 if there is none."""
    places = torch.arange(len(mask), device=mask.device)
    start = torch.full((num_segments,), -1, dtype=torch.int64, device=mask.device)
    return start.scatter_reduce(0, segment_ids, torch.where(mask, places, -1), reduce="amax")


def previous_unmasked(mask: Tensor, segment_ids: Tensor) -> Tensor:
    """[N] int64: the last unmasked index at or before each token in its own sequence, -1 if there is none."""
    if len(mask) == 0:
        return torch.zeros(0, dtype=torch.int64, device=mask.device)
    places = torch.arange(len(mask), device=mask.device)
    before = torch.where(mask, places, -1).cummax(0).values
    same = segment_ids[before.clamp(min=0)] == segment_ids
    return torch.where(same, before, -1)


def masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """(mean, unbiased variance, count) of the unmasked entries, in float64; zeros if there are too few."""
    count = int(mask.sum())
    wide = clean(x, mask).double()
    mean = wide.sum() / max(count, 1)
    spread = torch.where(mask, wide - mean, 0.0).square().sum()
    return mean, spread / max(count - 1, 1), count
