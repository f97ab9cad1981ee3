"""The term of the actor's loss that pulls the policy towards the teacher of each token.

    sum_t weight_t distill_weight_t D_t,   D_t the divergence of the policy from the teacher of token t

distill_weight is the coefficient of this step times the teacher's own, and 0 for tokens without a teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.divergences import DIVERGENCES, Divergence, make_divergence, with_tail
from megarl.algo.tally import Tally

WEIGHT = "distill_weight"
# Of a place without a token, id -1, among a teacher's most likely ones: a probability of 0, and no difference is NaN.
NO_LOG_PROB = -1e4


@dataclass(frozen=True)
class Distillation:
    """Example: Distillation("jsd", beta=0.1, teachers=("math", "code"))."""

    divergence: str = "reverse_kl"  # a name of DIVERGENCES
    beta: float = 0.5  # of jsd: the teacher's share of the mixture
    top_k: bool = False  # over each teacher's most likely tokens and a bucket for the others; else over the vocabulary
    teachers: tuple[str, ...] = ()  # their names, for the statistics, in the order of their numbers

    def __post_init__(self) -> None:
        """Raises: ValueError for an unknown divergence or a beta outside of its range."""
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"distill.divergence={self.divergence}: expected one of {', '.join(DIVERGENCES)}")
        if not 0 < self.beta < 1:
            raise ValueError(f"distill.beta={self.beta}: expected a number between 0 and 1, both excluded")

    @property
    def function(self) -> Divergence:
        """The terms of the divergence at each token of the vocabulary."""
        return make_divergence(self.divergence, self.beta)

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss or the model's side of it needs."""
        theirs = ("teacher_ids", "teacher_top_log_probs") if self.top_k else ("teacher_hidden",)
        return ("teacher", WEIGHT, *theirs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The model's columns that the loss needs."""
        return ("log_probs_of_ids",) if self.top_k else ("divergence",)

    def __call__(
        self, columns: Mapping[str, Tensor], outputs: Mapping[str, Tensor], mask: Tensor, tally: Tally
    ) -> Tensor:
        """distill_weight D [T], 0 where masked; its statistics go to `tally`.

        Args: columns: teacher [T], the number of each token's teacher, from 1, 0 for none; distill_weight [T]; for
            top_k teacher_top_log_probs [T, K].  outputs: divergence [T], or log_probs_of_ids [T, K]: the policy's
            log-probs of the teacher's K tokens.
        """
        teacher = torch.where(mask, columns["teacher"], 0)
        taught = teacher > 0
        if self.top_k:
            sides = (outputs["log_probs_of_ids"], columns["teacher_top_log_probs"])
            value = with_tail(self.function, *(torch.where(taught[:, None], side, 0.0) for side in sides))
        else:
            value = outputs["divergence"]
        value = torch.where(taught, value, 0.0)
        tally.watch(f"divergence {self.divergence}", value)
        tally.mean("distill/divergence", value, where=taught)
        for number, name in enumerate(self.teachers, 1):
            tally.mean(f"distill/{name}/divergence", value, where=teacher == number)
        return torch.where(taught, columns[WEIGHT], 0.0) * value
