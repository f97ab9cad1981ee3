"""The driver's handle on a reward model that scores on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megarl.batch import Batch
from megarl.roles.handles import Role


@dataclass
class RewardModel(Role):
    """A sequence classifier with one label, on ranks: a critic that is not trained.

    `weight`: how much its score counts in a sample's reward.
    """

    kind: str = field(default="critic", init=False)
    weight: float = 1.0

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The score of each sequence of tokens: the head's output at its last token."""
        # A column has the value before each token, so behind the last one stands one more, which nothing looks at.
        lengths = torch.tensor([len(tokens) + 1 for tokens in sequences])
        tokens = torch.tensor([token for tokens in sequences for token in (*tokens, 0)])
        values = self._columns(Batch(tokens, lengths, {}), ("values",))["values"]
        found: list[float] = values[lengths.cumsum(0) - 1].tolist()
        return found
