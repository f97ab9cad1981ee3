"""Sums, means and standard deviations over prompt groups, for all groups at once.

A sample without a trainable token, or of which none is kept, does not count in its group.  Groups may differ in size.
In a group with one remaining sample there is nothing to compare, and every estimator that compares gives this sample 0.
All computation is in float64: the mean of equal float32 scores is then exact, so that their difference is 0 and not a
rounding error that a division by the standard deviation would amplify.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.segments import clean, segment_count, segment_sum


@dataclass(frozen=True)
class Groups:
    """The groups of B samples; every method takes and returns one number per sample, [B] float64."""

    index: Tensor  # [B] int64: the group of each sample, 0 .. num_groups - 1
    num_groups: int
    takes_part: Tensor  # [B] bool

    @classmethod
    def of(cls, group_ids: Tensor, takes_part: Tensor) -> Groups:
        """group_ids [B]: any integers, equal for samples of one prompt."""
        names, index = group_ids.unique(return_inverse=True)
        return cls(index, len(names), takes_part)

    def total(self, x: Tensor) -> Tensor:
        """The sum over the samples of the same group that take part."""
        return segment_sum(clean(x, self.takes_part).double(), self.index, self.num_groups)[self.index]

    @property
    def size(self) -> Tensor:
        """The number of samples of the same group that take part."""
        return self.total(torch.ones(len(self.index), device=self.index.device))

    @property
    def compares(self) -> Tensor:
        """[B] bool: the sample and at least one other sample of its group take part."""
        return self.takes_part & (self.size > 1)

    def centred(self, x: Tensor) -> Tensor:
        """x - mean_g; 0 for a sample without another sample to compare with."""
        return torch.where(self.compares, x.double() - self.total(x) / self.size, 0.0)

    def std(self, x: Tensor) -> Tensor:
        """The unbiased standard deviation; 0 in a group of one."""
        return (self.total(self.centred(x).square()) / (self.size - 1).clamp(min=1)).sqrt()

    def highest(self, x: Tensor) -> Tensor:
        """The maximum of the group; -inf if no sample takes part."""
        low = torch.full((self.num_groups,), -torch.inf, dtype=torch.float64, device=x.device)
        live = torch.where(self.takes_part, x.double(), -torch.inf)
        return low.scatter_reduce(0, self.index, live, "amax")[self.index]

    def differ(self, x: Tensor) -> Tensor:
        """[B] bool: takes part in a group in which x is not equal for all samples."""
        return self.takes_part & (self.highest(x) > -self.highest(-x))

    def without(self, samples: Tensor) -> Groups:
        """The same groups without these samples [B] bool."""
        return Groups(self.index, self.num_groups, self.takes_part & ~samples)


def samples_of(rewards: Tensor, mask: Tensor, segment_ids: Tensor, group_ids: Tensor) -> tuple[Tensor, Groups]:
    """R [B] float64, the sum of each sample's token rewards, and the groups of samples with a trainable token.

    Args: rewards [N]; mask [N] bool; segment_ids [N]; group_ids [B].
    """
    num_sequences = len(group_ids)
    scores = segment_sum(rewards.double(), segment_ids, num_sequences)
    return scores, Groups.of(group_ids, segment_count(mask, segment_ids, num_sequences) > 0)


def on_tokens(x: Tensor, mask: Tensor, segment_ids: Tensor) -> Tensor:
    """x [B] -> [N] float32: every trainable token of a sample gets its number, other tokens get 0."""
    return clean(x[segment_ids], mask).float()
