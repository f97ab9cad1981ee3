"""The data types of the training loop, from `Prompt` to `LossOutput`, in the order in which they are made.

All packages exchange these types.  Batches are ragged, micro-batches packed; sequences are never padded.
Entry t of a column describes token t: `log_probs[t]` is the log-probability of token t given the tokens before it
(0 for a sequence's first token, which nothing predicts) and `values[t]` is the value just before token t is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One question.  Example: Prompt("0-17", [12, 34], "12+34=", "46", "arithmetic")."""

    uid: str  # epoch and row of the file: the same row in two epochs gives two groups
    token_ids: list[int]
    text: str | list[dict[str, str]]  # as in the file: a string, or chat messages
    ground_truth: str | None = None
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)  # all other fields of the row, for the reward


@dataclass(frozen=True)
class VersionSpan:
    """Tokens `start` (inclusive) to `end` (exclusive) of a completion were generated with weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """A generated completion.  Example: token_ids [4, 6, 1], log_probs [-0.1, -0.7, -0.0], finish_reason "stop"."""

    token_ids: list[int]  # the stop token included
    log_probs: list[float]  # of the temperature-scaled softmax, as the server computed it
    finish_reason: str  # stop | length | abort
    versions: tuple[VersionSpan, ...]
    text: str = ""
    # What else travels with the tokens, by name, each [tokens of the prompt and of the completion, ...] of any dtype.
    # Not compared by ==: arrays have no single truth value.
    columns: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class TurnSpan:
    """Tokens `start` (inclusive) to `end` (exclusive) of a row are the answer of turn `turn` of its conversation."""

    turn: int
    start: int
    end: int


@dataclass(frozen=True)
class Row:
    """A sequence that a server saw to its end: context, and the answers in it that are learnt in this row.

    Example, the question "ab", the answer "c", a tool's response "d", the answer "ef":
        token_ids a b c d e f     learnt TurnSpan(0, 2, 3), TurnSpan(1, 4, 6)     log_probs of c e f
    Every generated token is learnt in exactly one row; in other rows that hold it, it is context.
    """

    token_ids: list[int]
    learnt: tuple[TurnSpan, ...]  # in the order of the tokens
    log_probs: list[float]  # of the learnt tokens, end to end
    versions: tuple[VersionSpan, ...]  # of the learnt tokens: positions in `log_probs`
    finish_reason: str  # of the last answer
    # As of a completion, one entry per token of `token_ids`.
    columns: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        edges = [0, *(edge for span in self.learnt for edge in (span.start, span.end)), len(self.token_ids)]
        assert edges == sorted(edges), f"learnt {self.learnt} overlap, or are outside the {edges[-1]} tokens"
        num_learnt = sum(span.end - span.start for span in self.learnt)
        assert len(self.log_probs) == num_learnt, f"{len(self.log_probs)} log-probs of {num_learnt} learnt tokens"
        starts, ends = [span.start for span in self.versions], [span.end for span in self.versions]
        assert [*starts, num_learnt] == [0, *ends], f"versions {self.versions} do not cover {num_learnt} learnt tokens"

    @property
    def mask(self) -> list[bool]:
        """Of each token: whether it is learnt in this row."""
        out = [False] * len(self.token_ids)
        for span in self.learnt:
            out[span.start : span.end] = [True] * (span.end - span.start)
        return out


REWARD_ERROR = "reward_error"  # extra number, 1.0, of a sample on which the reward function failed


@dataclass(frozen=True)
class Sample:
    """A prompt, one completion of it, and its reward."""

    prompt: Prompt
    completion: Completion
    reward: float
    reward_extra: dict[str, float] = field(default_factory=dict)  # extra numbers of the reward function
    greedy_reward: float | None = None  # of a greedy completion of the same prompt, if one was requested


@dataclass(frozen=True)
class LostRollout:
    """A prompt without completions: a value, not an exception, so that one failed request does not stop a run."""

    prompt: Prompt
    reason: str
    unscored: int = 0  # completions that no reward could score; 0: the generation failed


@dataclass(frozen=True)
class Batch:
    """B whole sequences, concatenated; N is the sum of their lengths.

    Example, two sequences "ab|c" and "a|bc" (prompt|response):
        tokens   a b c a b c      lengths 3 3
        columns["response_mask"]   0 0 1 0 1 1        [N], one number per token
        per_sequence["group"]      0 1                [B], one number per sequence

    A column may hold several numbers per token, [N, ...], and have any dtype.  Batches carry columns that they do not
    know; the code that reads one knows its shape.
    """

    tokens: Tensor  # [N] int64
    lengths: Tensor  # [B] int64, prompt and response
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # each [N, ...]
    per_sequence: Mapping[str, Tensor] = field(default_factory=dict)  # each [B]

    def __post_init__(self) -> None:
        n, b = len(self.tokens), len(self.lengths)
        assert int(self.lengths.sum()) == n, f"lengths sum to {int(self.lengths.sum())}, tokens are {n}"
        for name, column in self.columns.items():
            assert column.shape[:1] == (n,), f"column {name} has shape {tuple(column.shape)}, expected ({n}, ...)"
        for name, row in self.per_sequence.items():
            assert row.shape[:1] == (b,), f"per_sequence {name} has shape {tuple(row.shape)}, expected ({b}, ...)"

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def segment_ids(self) -> Tensor:
        """[N] int64: the sequence that each token belongs to."""
        return segment_ids(self.lengths)

    @property
    def starts(self) -> Tensor:
        """[B] int64: where each sequence begins in `tokens`."""
        return self.lengths.cumsum(0) - self.lengths

    def with_columns(self, **columns: Tensor) -> Batch:
        return replace(self, columns={**self.columns, **columns})

    def with_per_sequence(self, **numbers: Tensor) -> Batch:
        return replace(self, per_sequence={**self.per_sequence, **numbers})

    def keep_columns(self, *names: str) -> Batch:
        """The same sequences with only these columns and without per_sequence: what is sent to a rank."""
        return replace(self, columns={n: self.columns[n] for n in names}, per_sequence={})

    def select(self, indices: Sequence[int]) -> Batch:
        """These sequences, in this order."""
        pick = torch.as_tensor(indices, dtype=torch.int64)
        where = token_positions(self.lengths, pick)
        return Batch(
            tokens=self.tokens[where],
            lengths=self.lengths[pick],
            columns={n: c[where] for n, c in self.columns.items()},
            per_sequence={n: r[pick] for n, r in self.per_sequence.items()},
        )

    def split(self, column: Tensor) -> list[Tensor]:
        """A [N, ...] column as one tensor per sequence."""
        return list(column.split(self.lengths.tolist()))


def segment_ids(lengths: Tensor) -> Tensor:
    """lengths [B] -> [N]: 0 repeated lengths[0] times, then 1, ..."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def token_positions(lengths: Tensor, indices: Tensor) -> Tensor:
    """Positions of the tokens of sequences `indices` in the flat [N] order, in the order of `indices`."""
    if len(indices) == 0:
        return torch.zeros(0, dtype=torch.int64)
    starts = (lengths.cumsum(0) - lengths)[indices]
    picked = lengths[indices]
    inside = torch.arange(int(picked.sum())) - torch.repeat_interleave(picked.cumsum(0) - picked, picked)
    return torch.repeat_interleave(starts, picked) + inside


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: a few sequences packed into one row.

    A dummy keeps the number of micro-batches equal on all data-parallel ranks; it has weight 0.
    """

    batch: Batch
    is_dummy: bool = False


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
class LossOutput:
    """The result of a loss function for one micro-batch: a scalar to differentiate, and statistics."""

    loss: Tensor  # [] the sum of weight * token_loss over the micro-batch
    stats: Stats
