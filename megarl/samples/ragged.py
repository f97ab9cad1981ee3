"""A column that holds a list of numbers for each token: ragged, so that most of it is not padding.

Outside of a batch it behaves as a column of numpy: `len`, slices, `np.concatenate`.  A batch holds it as two columns of
one number, or a few numbers, per token (`spread`), which every packing carries as it carries others, because rows stay
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

COUNTS = "/counts"  # ends the name of the column with the lengths of the lists


def names_in_batch(name: str) -> tuple[str, str]:
    """Of the two columns that a batch has for one that is called `name`."""
    return name, name + COUNTS


class Ragged:
    """Lists of numbers, end to end.  Example: Ragged.of([[7], [], [3, 5]]): counts [1, 0, 2], values [7, 3, 5]."""

    def __init__(self, counts: np.ndarray, values: np.ndarray) -> None:
        assert int(counts.sum()) == len(values), f"lists of {int(counts.sum())} numbers hold {len(values)}"
        self.counts, self.values = counts, values

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Self:
        counts = np.fromiter(map(len, lists), dtype=np.int32)
        return cls(counts, np.fromiter(chain.from_iterable(lists), dtype=np.int32))

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, None]:
        """None: a list has any length."""
        return len(self.counts), None

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, part: slice) -> Ragged:
        start, stop, step = part.indices(len(self))
        assert step == 1, "only runs of lists are taken"
        edges = np.concatenate([[0], self.counts.cumsum(dtype=np.int64)])
        return Ragged(self.counts[start:stop], self.values[edges[start] : edges[max(start, stop)]])

    def copy(self) -> Ragged:
        return Ragged(self.counts.copy(), self.values.copy())

    def lists(self) -> list[list[int]]:
        found: list[list[int]] = [part.tolist() for part in np.split(self.values, self.counts.cumsum()[:-1])]
        return found if len(self) else []

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG002
        """Numpy asks here if one of its functions gets such a column: https://numpy.org/neps/nep-0018."""
        if function is not np.concatenate or not all(isinstance(part, Ragged) for part in args[0]):
            return NotImplemented
        counts, values = ([getattr(part, name) for part in args[0]] for name in ("counts", "values"))
        return Ragged(np.concatenate(counts), np.concatenate(values))

    def spread(self, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
        """Of tokens in rows of these lengths: (places [N, W], counts [N] int32); `gathered` undoes it.

        The lists of a row are end to end in its W places per token, in the order of its tokens, and 0 behind them.  W
        is the mean length of a list of the fullest row: less than that of the longest list, but one row of long lists
        makes the places of all rows many.
        """
        ends = lengths.cumsum()
        edges = np.concatenate([[0], self.counts.cumsum(dtype=np.int64)])
        sizes = edges[ends] - edges[ends - lengths]  # numbers of each row
        width = int(np.max(-(-sizes // np.maximum(lengths, 1)), initial=0))
        places = np.zeros((len(self), width), dtype=self.dtype)
        starts = (ends - lengths) * width
        inside = np.arange(len(self.values)) - np.repeat(edges[ends - lengths], sizes)
        places.reshape(-1)[np.repeat(starts, sizes) + inside] = self.values
        return torch.from_numpy(places), torch.from_numpy(self.counts.astype(np.int32))


def gathered(places: Tensor, counts: Tensor, row_starts: Tensor, row_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The lists of a batch's tokens: (starts [N] int64, of each list in the numbers, numbers [N * W]).

    counts [N] int64; `row_starts` [R] and `row_ids` [N] are the batch's.  The list of token t is
    numbers[starts[t] : starts[t] + counts[t]].
    """
    before = counts.cumsum(0) - counts  # numbers in the lists of all tokens before
    within = before - before[row_starts][row_ids]
    return row_starts[row_ids] * places.size(1) + within, places.reshape(-1)
