"""Sums and means over the unmasked places of a tensor, under the names that plug-ins for verl import."""

from __future__ import annotations

import torch
from torch import Tensor

Axis = int | tuple[int, ...] | None


def masked_sum(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """The sum where mask is not 0; what is masked may be NaN."""
    return torch.where(mask != 0, values, 0.0).sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """The mean where mask is not 0; 0 where everything is masked."""
    return masked_sum(values, mask, axis) / mask.sum(axis).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """The variance where mask is not 0; unbiased: of n numbers, over n - 1."""
    count = mask.sum()
    square = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return square * count / (count - 1).clamp(min=1) if unbiased else square


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values with deviation 1 and, with shift_mean, mean 0."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean
