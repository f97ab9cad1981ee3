"""The driver's handle on a teacher that runs on ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.batch import Batch
from megarl.roles.handles import Reference


@dataclass
class Teacher(Reference):
    """A frozen model from which the policy learns."""

    def hidden_states(self, batch: Batch) -> Tensor:
        """[N, H] in the model's type: the last hidden state from which each of the batch's tokens is predicted."""
        return self._columns(batch, ("hidden_states",))["hidden_states"]

    def top_log_probs(self, batch: Batch, k: int, vocab_size: int) -> tuple[Tensor, Tensor]:
        """ids [N, k] and log-probs [N, k]: the k most likely tokens at each place, of the first `vocab_size` tokens."""
        found = self._columns(batch, ("top_ids", "top_log_probs"), top_k=k, vocab_size=vocab_size)
        return found["top_ids"], found["top_log_probs"]
