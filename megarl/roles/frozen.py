"""The driver's handles on models on ranks that are not trained and give more than log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.roles.handles import Role
from megarl.samples.batch import Batch
from megarl.weights.mapping.blocks import Role as Kind


@dataclass
class Teacher(Role):
    """A model from which the policy learns."""

    def hidden_states(self, batch: Batch) -> Tensor:
        """[N, H] in the model's type: the last hidden state from which each of the batch's tokens is predicted."""
        return self.columns(batch, ("hidden_states",))["hidden_states"]

    def top_log_probs(self, batch: Batch, k: int, vocab_size: int) -> tuple[Tensor, Tensor]:
        """ids [N, k] and log-probs [N, k]: the k most likely tokens at each place, of the first `vocab_size` tokens."""
        found = self.columns(batch, ("top_ids", "top_log_probs"), top_k=k, vocab_size=vocab_size)
        return found["top_ids"], found["top_log_probs"]


@dataclass
class RewardModel(Role):
    """A sequence classifier with one label: a critic that is not trained.

    `weight`: how much its score counts in a sample's reward.
    """

    kind: Kind = field(default="critic", init=False)
    weight: float = 1.0

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The score of each sequence of tokens: the head's output at its last token."""
        # A column has the value before each token, so behind the last one stands one more, which nothing looks at.
        lengths = torch.tensor([len(tokens) + 1 for tokens in sequences])
        tokens = torch.tensor([token for tokens in sequences for token in (*tokens, 0)])
        values = self.columns(Batch(tokens, lengths, {}), ("values",))["values"]
        found: list[float] = values[lengths.cumsum(0) - 1].tolist()
        return found
