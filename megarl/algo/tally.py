"""Statistics of a micro-batch: reduces many [T] columns to one tensor of numbers, and that to a dictionary of Stat."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megarl.algo.finite import num_non_finite, require_finite
from megarl.algo.segments import clean
from megarl.samples.batch import LossOutput, Stat, Stats, Unread


class Tally:
    """Collects columns; `output()` reduces all of them with the loss's weights in one product.

    Means are kept as weighted sum and sum of weights, in float64, so that a small variance, which is a difference of
    sums, stays accurate.  A name with "~" is a part of a number that is computed after the last merge: `x~mean` and
    `x~square` give the standard deviation x; `x~error_mean|error_square|target_mean|target_square` give the explained
    variance x.
    """

    def __init__(self, weight: Tensor, mask: Tensor, segment_ids: Tensor) -> None:
        self._weight = weight.detach().double()
        self._mask = mask
        self._segment_ids = segment_ids
        self._live = mask & (weight != 0)
        self._means: dict[str, Tensor] = {}
        self._parts: dict[str, Tensor] = {}  # of a mean over a part of the tokens: 1 at these
        self._extremes: dict[str, tuple[str, Tensor]] = {}
        self._watched: dict[str, Tensor] = {}

    def watch(self, name: str, column: Tensor) -> None:
        """Let the output be NaN if this column is not finite at an unmasked place."""
        self._watched[name] = column.detach()

    def mean(self, name: str, column: Tensor, *, where: Tensor | None = None) -> None:
        """Add the column's mean, with the weights of the loss; `where` [T] bool: over these tokens only."""
        live = self._live if where is None else self._live & where
        self._means[name] = clean(column.detach(), live).double()
        if where is not None:
            self._parts[name] = live.double()

    def std(self, name: str, column: Tensor) -> None:
        """Add the parts of a standard deviation: mean and mean square."""
        wide = column.detach().double()
        self.mean(f"{name}~mean", wide)
        self.mean(f"{name}~square", wide.square())

    def explained_variance(self, name: str, prediction: Tensor, target: Tensor) -> None:
        """Add the parts of 1 - Var(target - prediction) / Var(target)."""
        target = target.detach().double()
        error = target - prediction.detach().double()
        for part, column in (("error", error), ("target", target)):
            self.mean(f"{name}~{part}_mean", column)
            self.mean(f"{name}~{part}_square", column.square())

    def extremes(self, name_min: str, name_max: str, column: Tensor) -> None:
        """Add the column's minimum and maximum over unmasked places."""
        self._extremes[name_min] = ("min", column.detach())
        self._extremes[name_max] = ("max", column.detach())

    def output(self, loss: Tensor) -> LossOutput:
        """The loss with its statistics; NaN if a watched column is not finite."""
        scalars = [num_non_finite(self._watched, self._mask).double(), self._weight.sum()]
        scalars += [self._extreme(kind, column) for kind, column in self._extremes.values()]
        columns = [*self._means.values(), *self._parts.values()]
        sums = [torch.stack(columns) @ self._weight] if columns else []
        numbers = torch.cat([torch.stack(scalars), *sums])
        is_bad = numbers[0] > 0
        kinds = {name: kind for name, (kind, _) in self._extremes.items()}
        watched = partial(
            require_finite, self._watched, self._mask, self._segment_ids
        )  # kept, for who has to say where
        read = partial(_read, watched, kinds, tuple(self._means), tuple(self._parts))
        return LossOutput(torch.where(is_bad, math.nan, loss), Unread(numbers, is_bad, read))

    def _extreme(self, kind: str, column: Tensor) -> Tensor:
        if len(column) == 0:
            return torch.full((), math.inf, dtype=torch.float64, device=column.device)
        empty = math.inf if kind == "min" else -math.inf
        masked = torch.where(self._live, column.double(), empty)
        return masked.amin() if kind == "min" else masked.amax()


def _read(
    require: Callable[[], None],
    kinds: dict[str, str],
    means: tuple[str, ...],
    parts: tuple[str, ...],
    read: list[float],
) -> Stats:
    """Raises: NonFiniteError if a watched column is not finite.

    Extremes, and means over a part, are left out if they are over no token.
    """
    bad, weight, *numbers = read
    if bad:
        require()
    extremes = zip(kinds.items(), numbers, strict=False)
    out = {name: Stat(kind, value) for (name, kind), value in extremes if math.isfinite(value)}
    first = len(kinds)
    weights = dict.fromkeys(means, weight) | dict(zip(parts, numbers[first + len(means) :], strict=True))
    found = zip(means, numbers[first:], strict=False)
    return out | {
        name: Stat("mean", value, weights[name]) for name, value in found if weights[name] or name not in parts
    }
