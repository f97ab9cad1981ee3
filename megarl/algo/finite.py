"""Stops the run at a number that is not finite at an unmasked place, and names the sequence."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class NonFiniteError(FloatingPointError):
    """A column holds NaN or infinity at a token that the policy generated.

    `column` is its name, `sequence` the index of the sequence in the given batch or micro-batch, `token` the index in
    that sequence, prompt included.  A caller that splits a batch adds the micro-batch's offset (`moved`); a caller that
    has the samples adds the sample's name (`named`).
    """

    report = ""  # further information for a file: the tracebacks of ranks

    def __init__(self, column: str, sequence: int, token: int, value: float, sample: str | None = None) -> None:
        place = sample or f"sequence {sequence} (counted in this batch or micro-batch)"
        super().__init__(
            f"{column} is {value} at token {token} of {place}, where the policy chose the token: expected a finite "
            "number"
        )
        self.column, self.sequence, self.token, self.value = column, sequence, token, value
        # Sent from a rank to the driver; the rank adds its replica.
        self.details = {"column": column, "sequence": sequence, "token": token, "value": value}

    def moved(self, by: int) -> NonFiniteError:
        """The same error, with the sequence index in a batch that has `by` sequences before the micro-batch."""
        return NonFiniteError(self.column, self.sequence + by, self.token, self.value)

    def named(self, sample: str) -> NonFiniteError:
        """The same error with the name of its sample instead of an index."""
        found = NonFiniteError(self.column, self.sequence, self.token, self.value, sample)
        found.report = self.report
        return found


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
