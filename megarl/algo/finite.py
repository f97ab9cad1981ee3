"""Numbers with which a run must not train: NaN, infinity and spikes, each with the sample or the rank that has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class BadNumber(FloatingPointError):
    """What was found in an optimizer step that was not made, or in a batch before its first step.

    `role`: whose step it was; "": it was found before any.  `groups`: the batch's prompt groups of this step.
    """

    report = ""  # further information for a file: the tracebacks of ranks
    role = ""
    groups: tuple[int, ...] = ()

    def name_sample(self, names: Sequence[str]) -> None:
        """Say the name of the sample, if the number is one of a sample; `names`: of the batch's sequences."""


def stop(found: BadNumber) -> None:
    """What is done about a bad number if nobody says otherwise."""
    raise found


class NonFiniteError(BadNumber):
    """A column holds NaN or infinity at a token that the policy generated, or a row of a batch at a sequence.

    `column` is its name, `sequence` the index of the sequence in the given batch or micro-batch, `token` the index in
    that sequence, prompt included; None: the number belongs to the whole sequence.  A caller that splits a batch adds
    the micro-batch's offset (`moved`); a caller that has the samples adds the sample's name (`name_sample`).
    """

    def __init__(self, column: str, sequence: int, token: int | None, value: float) -> None:
        self.column = column
        self.sequence = sequence
        self.token = token
        self.value = value
        self._place = f"sequence {sequence} (counted in this batch or micro-batch)"
        super().__init__(column, sequence, token, value)

    def __str__(self) -> str:
        if self.token is None:
            return f"{self.column} is {self.value} for {self._place}: expected a finite number"
        return (
            f"{self.column} is {self.value} at token {self.token} of {self._place}, where the policy chose the token: "
            "expected a finite number"
        )

    @property
    def details(self) -> dict[str, Any]:
        """Sent from a rank to the driver, which makes the same error of it."""
        return {"column": self.column, "sequence": self.sequence, "token": self.token, "value": self.value}

    def moved(self, by: int) -> NonFiniteError:
        """The same error, with the sequence index in a batch that has `by` sequences before the micro-batch."""
        return NonFiniteError(self.column, self.sequence + by, self.token, self.value)

    def name_sample(self, names: Sequence[str]) -> None:
        """Say the sample's name in place of the sequence's index."""
        self._place = f"sample {names[self.sequence]}"


def num_non_finite(columns: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    """[] int64: the number of unmasked entries of these [N] columns that are not finite; stays on the device."""
    bad = [(mask & ~column.isfinite()).sum() for column in columns.values()]
    return torch.stack(bad).sum() if bad else torch.zeros((), dtype=torch.int64, device=mask.device)


def require_finite(columns: Mapping[str, Tensor], mask: Tensor, segment_ids: Tensor) -> None:
    """Raises: NonFiniteError for the first unmasked entry of the first column that is not finite."""
    if int(num_non_finite(columns, mask)) == 0:
        return
    for name, column in columns.items():
        bad = (mask & ~column.isfinite()).nonzero()
        if len(bad):
            place = int(bad[0])
            sequence = int(segment_ids[place])
            token = place - int((segment_ids < sequence).sum())
            raise NonFiniteError(name, sequence, token, float(column[place]))


def require_finite_row(name: str, row: Tensor) -> None:
    """`row` [B] or [B, K]: numbers of whole sequences.  Raises: NonFiniteError for the first that is not finite."""
    bad = (~row.isfinite()).nonzero()
    if len(bad):
        raise NonFiniteError(name, int(bad[0, 0]), None, float(row[tuple(bad[0])]))
