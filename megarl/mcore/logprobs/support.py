"""The tokens that could be drawn: log-probs of what top-p or top-k narrowed are over these alone.

A server that samples with top_p < 1 or top_k draws from the renormalised part of its distribution.  That part, the
support, comes with each token, and every column of the token is computed over it: with pi the whole distribution and S
the support, pi_S(v) = pi(v) / sum_{u in S} pi(u) (DeepSeek-V3.2, arXiv:2512.02556, section 3.1: keep sampling mask).
It stays what it was when the token was drawn, also where the trained policy would have another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.ragged import COUNTS, gathered
from megarl.sample import SUPPORT, Batch

# In the place of the logit of a token that could not be drawn: e^x is 0, and no sum of these overflows or is NaN.
EXCLUDED = -1e25


@dataclass(frozen=True)
class Support:
    """Of the token that each place of a row predicts: which ids could be drawn; no ids: all of the vocabulary."""

    starts: Tensor  # [T] int64, of each place in `ids`
    counts: Tensor  # [T] int64
    ids: Tensor  # [any number] int32

    @classmethod
    def of(cls, batch: Batch, predicted: Tensor, device: torch.device) -> Support | None:
        """None if the batch does not know any.  predicted [T]: the index of the token that a place predicts, or -1."""
        if SUPPORT not in batch.columns:
            return None
        counts = batch.columns[SUPPORT + COUNTS].long()
        starts, ids = gathered(batch.columns[SUPPORT], counts, batch.row_starts, batch.row_ids)
        at = predicted.clamp(min=0)
        own = torch.where(predicted >= 0, counts[at], 0)
        return cls(starts[at].to(device), own.to(device), ids.to(device))

    def at(self, places: Tensor) -> Support:
        """Of these places only."""
        return Support(self.starts[places], self.counts[places], self.ids)

    def exclude_(self, logits: Tensor, first_id: int, num_real: int) -> None:
        """Overwrite the logits [T, W] of ids that could not be drawn.

        Column i is id `first_id` + i; of these the first `num_real` are ids of the vocabulary, the others padding.
        """
        place = torch.repeat_interleave(torch.arange(len(self.counts), device=logits.device), self.counts)
        inside = torch.arange(len(place), device=logits.device) - (self.counts.cumsum(0) - self.counts)[place]
        column = self.ids[self.starts[place] + inside].long() - first_id
        here = (column >= 0) & (column < num_real)
        excluded = (self.counts > 0)[:, None].expand(logits.shape).contiguous()
        excluded[place[here], column[here]] = False
        logits.masked_fill_(excluded, EXCLUDED)
