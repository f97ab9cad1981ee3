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

from megarl.samples.batch import Batch
from megarl.samples.ragged import COUNTS, gathered
from megarl.samples.sample import SUPPORT

# In the place of the logit of a token that could not be drawn: e^x is 0, and no sum of these overflows or is NaN.
EXCLUDED = -1e25


@dataclass(frozen=True)
class Support:
    """Of the token that each place of a row predicts: which ids could be drawn; no ids: all of the vocabulary.

    A row keeps it in host memory: only the last stage reads it, of one row at a time (`PackedRow.support_there`).
    """

    starts: Tensor  # [T] int64, of each place in `ids`
    counts: Tensor  # [T] int64
    ids: Tensor  # [any number] int32

    @classmethod
    def of(cls, batch: Batch, predicted: Tensor) -> Support | None:
        """None if the batch does not know any.  predicted [T]: the index of the token that a place predicts, or -1."""
        if SUPPORT not in batch.columns:
            return None
        counts = batch.columns[SUPPORT + COUNTS].long()
        starts, ids = gathered(batch.columns[SUPPORT], counts, batch.row_starts, batch.row_ids)
        at = predicted.clamp(min=0)
        return cls(starts[at], torch.where(predicted >= 0, counts[at], 0), ids)

    def split(self, places: Tensor, most: int) -> tuple[Tensor, ...]:
        """Parts of these places [C], one after the other, with about `most` ids each: fewer than `most` and one more
        place's."""
        counts = self.counts[places]
        part = (counts.cumsum(0) - counts) // most
        return places.split(part.unique_consecutive(return_counts=True)[1].tolist())

    def at(self, places: Tensor) -> SupportOfLot:
        """Of these places [C] only."""
        counts = self.counts[places]
        place = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        inside = torch.arange(len(place), device=counts.device) - (counts.cumsum(0) - counts)[place]
        return SupportOfLot(counts > 0, place, self.ids[self.starts[places][place] + inside])


@dataclass(frozen=True)
class SupportOfLot:
    """Of C places whose logits are computed one part of the vocabulary after the other."""

    is_known: Tensor  # [C] bool
    place: Tensor  # [M] int64: of each id, whose it is
    ids: Tensor  # [M] int32

    def exclude_(self, logits: Tensor, first_id: int, num_real: int) -> None:
        """Overwrite the logits [C, W] of ids that could not be drawn.

        Column i is id `first_id` + i; of these the first `num_real` are ids of the vocabulary, the others padding.
        """
        column = self.ids - first_id
        here = (column >= 0) & (column < num_real)
        excluded = self.is_known[:, None].expand(logits.shape).contiguous()
        excluded[self.place[here], column[here].long()] = False
        logits.masked_fill_(excluded, EXCLUDED)
