"""Statistics of groups of rows, under the names that estimators for verl import."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def as_torch_index(index: Tensor | Iterable[Any], device: torch.device | str | None = None) -> Tensor:
    """[B] labels of groups, such as names of prompts, as numbers from 0, in the order in which they first come.

    >>> as_torch_index(["b", "a", "b"])
    tensor([0, 1, 0])
    """
    labels = index.flatten().tolist() if isinstance(index, Tensor) else list(index)
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return torch.tensor([numbers[label] for label in labels], dtype=torch.int64, device=device)


def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, deviation and size of each group [G], of [B] scores and the numbers of their groups.

    The variance of n scores is over n - 1, and at least eps.  A group of one has mean 0 and deviation 1, so that
    its score stays as it is.
    """
    scores, gidx = scores.flatten().to(device), gidx.flatten().to(device)
    count = torch.bincount(gidx).to(scores.dtype)
    mean = torch.zeros_like(count).index_add(0, gidx, scores) / count.clamp(min=1)
    square = torch.zeros_like(count).index_add(0, gidx, (scores - mean[gidx]) ** 2)
    std = (square / (count - 1).clamp(min=1)).clamp(min=eps).sqrt()
    is_alone = count <= 1
    return mean.masked_fill(is_alone, 0.0), std.masked_fill(is_alone, 1.0), count
