"""What the trainer computes with: a `Batch` of samples, its micro-batches, and what a loss gives back.

Batches are ragged, micro-batches packed; rows are never padded.
Entry t of a column describes token t: `log_probs[t]` is the log-probability of token t given the tokens before it
(0 for a row's first token, which nothing predicts) and `values[t]` is the value just before token t is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

SEGMENT_IDS = "segment_ids"
SIGN = "sign"  # of pairs of answers: 1 on the chosen one, -1 on the rejected one


@dataclass(frozen=True)
class Batch:
    """S samples, each of one or more rows, concatenated: R rows, and N tokens, the sum of their lengths.

    Example, two samples of "ab|c", and of "a|bc" with a second row "ad|e" (context|learnt):
        tokens   a b c a b c a d e    lengths 3 3 3    rows 1 2
        columns["response_mask"]   0 0 1 0 1 1 0 0 1   [N], one number per token
        per_sequence["group"]      0 1                 [S], one number per sample

    A sample is one sequence of decisions: `segment_ids`, `per_sequence` and `num_sequences` are of samples, and so is
    every estimator, loss and mean.  Only a model sees rows: `lengths`, `row_ids` and `row_starts`.
    A column may hold several numbers per token, [N, ...], and have any dtype.  Batches carry columns that they do not
    know; the code that reads one knows its shape.
    """

    tokens: Tensor  # [N] int64
    lengths: Tensor  # [R] int64, of each row, context included
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # each [N, ...]
    per_sequence: Mapping[str, Tensor] = field(default_factory=dict)  # each [S, ...]
    rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # [S] of each sample; left out: 1

    def __post_init__(self) -> None:
        if len(self.rows) == 0:
            object.__setattr__(self, "rows", torch.ones_like(self.lengths))
        n, s = len(self.tokens), len(self.rows)
        assert int(self.lengths.sum()) == n, f"lengths sum to {int(self.lengths.sum())}, tokens are {n}"
        assert int(self.rows.sum()) == len(self.lengths), (
            f"samples of {self.rows.tolist()} rows, {len(self.lengths)} lengths"
        )
        for name, column in self.columns.items():
            assert column.shape[:1] == (n,), f"column {name} has shape {tuple(column.shape)}, expected ({n}, ...)"
        for name, row in self.per_sequence.items():
            assert row.shape[:1] == (s,), f"per_sequence {name} has shape {tuple(row.shape)}, expected ({s}, ...)"

    @property
    def num_sequences(self) -> int:
        """S: samples, each a sequence of decisions."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def segment_ids(self) -> Tensor:
        """[N] int64: the sample that each token belongs to; of the column of this name if the batch has one.

        Lengths stay on the CPU: a rank sends the column to the device together with the others.
        """
        own = self.columns.get(SEGMENT_IDS)
        return segment_ids(self.rows)[self.row_ids] if own is None else own

    @property
    def row_ids(self) -> Tensor:
        """[N] int64: the row that each token belongs to."""
        return segment_ids(self.lengths)

    @property
    def row_starts(self) -> Tensor:
        """[R] int64: where each row begins in `tokens`."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def sample_lengths(self) -> Tensor:
        """[S] int64: the tokens of all rows of each sample."""
        return self.sum_rows(self.lengths)

    def sum_rows(self, numbers: Tensor) -> Tensor:
        """[R] -> [S], the sum over the rows of each sample."""
        return numbers.new_zeros(self.num_sequences).index_add(0, segment_ids(self.rows), numbers)

    def context_lengths(self, mask: Tensor) -> Tensor:
        """mask [N] bool -> [R] int64: the tokens of each row before its first unmasked one; all if there is none."""
        places, ids = torch.arange(self.num_tokens)[mask], self.row_ids[mask]
        ends = self.row_starts + self.lengths
        return ends.scatter_reduce(0, ids, places, reduce="amin") - self.row_starts

    def with_columns(self, **columns: Tensor) -> Batch:
        return replace(self, columns={**self.columns, **columns})

    def with_per_sequence(self, **numbers: Tensor) -> Batch:
        return replace(self, per_sequence={**self.per_sequence, **numbers})

    def keep_columns(self, *names: str) -> Batch:
        """The same samples with only these columns and without per_sequence: what is sent to a rank."""
        return replace(self, columns={n: self.columns[n] for n in names}, per_sequence={})

    def by_row(self) -> Batch:
        """The same tokens with each row as a sample of its own, for passes in which the rows of a sample may part."""
        repeated = {name: numbers[segment_ids(self.rows)] for name, numbers in self.per_sequence.items()}
        return replace(self, per_sequence=repeated, rows=torch.ones_like(self.lengths))

    def select(self, indices: Sequence[int]) -> Batch:
        """These samples, in this order, each with all its rows."""
        pick = torch.as_tensor(indices, dtype=torch.int64)
        rows = token_positions(self.rows, pick)
        where = token_positions(self.lengths, rows)
        return Batch(
            tokens=self.tokens[where],
            lengths=self.lengths[rows],
            columns={n: c[where] for n, c in self.columns.items()},
            per_sequence={n: r[pick] for n, r in self.per_sequence.items()},
            rows=self.rows[pick],
        )

    def split(self, column: Tensor) -> list[Tensor]:
        """A [N, ...] column as one tensor per sample, its rows end to end."""
        return list(column.split(self.sample_lengths.tolist()))


def segment_ids(lengths: Tensor) -> Tensor:
    """lengths [B] -> [N]: 0 repeated lengths[0] times, then 1, ..."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def token_positions(lengths: Tensor, indices: Tensor) -> Tensor:
    """Positions of the members of segments `indices` in the flat order, in the order of `indices`.

    Of tokens with the lengths of rows, of rows with the number of rows of each sample.
    """
    if len(indices) == 0:
        return torch.zeros(0, dtype=torch.int64)
    starts = (lengths.cumsum(0) - lengths)[indices]
    picked = lengths[indices]
    inside = torch.arange(int(picked.sum())) - torch.repeat_interleave(picked.cumsum(0) - picked, picked)
    return torch.repeat_interleave(starts, picked) + inside


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: the rows of a few samples, packed end to end.

    A dummy keeps the number of micro-batches equal on all data-parallel ranks; it has weight 0.
    """

    batch: Batch
    is_dummy: bool = False
    shares_prefixes: bool = False  # its packed row has the tokens with which rows begin alike once


@dataclass(frozen=True)
class Stat:
    """A number and how it is reduced: a mean is kept as sum and weight, so that merged means are weighted correctly."""

    kind: str  # mean | sum | max | min
    value: float  # mean: the weighted sum
    weight: float = 1.0  # mean: the sum of the weights

    def merge(self, other: Stat) -> Stat:
        assert self.kind == other.kind, f"cannot merge a {self.kind} with a {other.kind}"
        if self.kind in ("mean", "sum"):
            return Stat(self.kind, self.value + other.value, self.weight + other.weight)
        pick = max if self.kind == "max" else min
        return Stat(self.kind, pick(self.value, other.value))

    def result(self) -> float:
        """The reduced number; a mean over nothing is 0."""
        if self.kind != "mean":
            return self.value
        return self.value / self.weight if self.weight else 0.0


Stats = dict[str, Stat]


def merge_stats(parts: Sequence[Stats]) -> Stats:
    """Merge dictionaries of statistics; a name that only some have is merged over these."""
    out: Stats = {}
    for part in parts:
        for name, stat in part.items():
            out[name] = out[name].merge(stat) if name in out else stat
    return out


@dataclass(frozen=True)
class Unread:
    """Statistics that are still numbers on a device: to read them waits for it, so those of a step are read together.

    `read` raises NonFiniteError if a number of the micro-batch was not finite.
    """

    numbers: Tensor  # [K] float64
    is_bad: Tensor  # [] bool: whether one was not
    read: Callable[[list[float]], Stats]


@dataclass(frozen=True)
class LossOutput:
    """The result of a loss function for one micro-batch: a scalar to differentiate, and statistics."""

    loss: Tensor  # [] the sum of weight * token_loss over the micro-batch; NaN if a number was not finite
    unread: Unread | None = None

    @property
    def stats(self) -> Stats:
        """Raises: NonFiniteError."""
        return {} if self.unread is None else self.unread.read(self.unread.numbers.tolist())
