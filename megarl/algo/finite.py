"""A number that is not finite at an unmasked place stops the run, with the name of the sequence."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class NonFiniteError(FloatingPointError):
    """A column holds NaN or infinity where the policy chose the token.

    `column` is its name, `sequence` the index of the sequence in the batch or micro-batch that was given, `token` the
    place in that sequence, prompt included.  Who knows of what the micro-batch is a part says where it begins there
    (`moved`), and who knows the samples says whose it is (`named`).
    """

    report = ""  # what else is known, for a file: the tracebacks of ranks

    def __init__(self, column: str, sequence: int, token: int, value: float, sample: str | None = None) -> None:
        place = sample or f"sequence {sequence} (counted in this batch or micro-batch)"
        super().__init__(
            f"{column} is {value} at token {token} of {place}, where the policy chose the token: expected a finite "
            "number"
        )
        self.column, self.sequence, self.token, self.value = column, sequence, token, value
        # What travels from a rank to the driver; a rank adds which replica it is in.
        self.details = {"column": column, "sequence": sequence, "token": token, "value": value}

    def moved(self, by: int) -> NonFiniteError:
        """The same error, its sequence counted in a batch that has `by` sequences before the micro-batch."""
        return NonFiniteError(self.column, self.sequence + by, self.token, self.value)

    def named(self, sample: str) -> NonFiniteError:
        """The same error with the name of its sample instead of a count."""
        found = NonFiniteError(self.column, self.sequence, self.token, self.value, sample)
        found.report = self.report
        return found


def num_non_finite(columns: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    """[] int64: how many unmasked entries of these [N] columns are not finite; stays on the device."""
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
