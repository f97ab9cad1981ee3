"""The data types of the training loop, from `Prompt` to `LossOutput`, in the order in which they are made.

All packages exchange these types.  Batches are ragged, micro-batches packed; rows are never padded.
Entry t of a column describes token t: `log_probs[t]` is the log-probability of token t given the tokens before it
(0 for a row's first token, which nothing predicts) and `values[t]` is the value just before token t is sampled.
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
    # Of the temperature-scaled softmax, over the tokens that could be drawn if these are known; the server computed it.
    log_probs: list[float]
    finish_reason: str  # stop | length | abort
    versions: tuple[VersionSpan, ...]
    text: str = ""
    # What else travels with the tokens, by name, each [tokens of the prompt and of the completion, ...] of any dtype.
    # Not compared by ==: arrays have no single truth value.
    columns: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)


# The column with the tokens that could be drawn for each token, because top-p or top-k left them; none: all of the
# vocabulary.  It is ragged, so a batch has two columns for it: see ragged.py.
SUPPORT = "sampling_support"
# Columns of a teacher, which the policy's ranks compare with the whole vocabulary: the hidden state [N, H] before each
# token; the ids [N, K] of which its log-probs are known.
TEACHER_HIDDEN, TEACHER_IDS = "teacher_hidden", "teacher_ids"


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
    rewards: tuple[float, ...] = ()  # of each of `learnt`; empty: only the sample as a whole has a reward
    # As of a completion, one entry per token of `token_ids`.
    columns: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, prompt_ids: Sequence[int], completion: Completion) -> Row:
        """A prompt and its completion, which is learnt."""
        token_ids = [*prompt_ids, *completion.token_ids]
        learnt = (TurnSpan(0, len(prompt_ids), len(token_ids)),)
        log_probs, versions, reason = completion.log_probs, completion.versions, completion.finish_reason
        return cls(token_ids, learnt, log_probs, versions, reason, columns=completion.columns)

    def __post_init__(self) -> None:
        edges = [0, *(edge for span in self.learnt for edge in (span.start, span.end)), len(self.token_ids)]
        assert edges == sorted(edges), f"learnt {self.learnt} overlap, or are outside the {edges[-1]} tokens"
        num_learnt = self.num_learnt
        assert num_learnt > 0, "no token of the row is learnt"
        is_predicted = all(0 < span.start < span.end for span in self.learnt)
        assert is_predicted, f"learnt {self.learnt}: an answer has tokens, and a row's first token follows nothing"
        assert len(self.log_probs) == num_learnt, f"{len(self.log_probs)} log-probs of {num_learnt} learnt tokens"
        starts, ends = [span.start for span in self.versions], [span.end for span in self.versions]
        assert [*starts, num_learnt] == [0, *ends], f"versions {self.versions} do not cover {num_learnt} learnt tokens"
        assert len(self.rewards) in (0, len(self.learnt)), f"{len(self.rewards)} rewards of {len(self.learnt)} answers"
        for name, column in self.columns.items():
            assert len(column) == len(self.token_ids), f"column {name}: {len(column)} of {len(self.token_ids)} tokens"

    @property
    def num_learnt(self) -> int:
        """How many of its tokens are learnt."""
        return sum(span.end - span.start for span in self.learnt)

    @property
    def learnt_ids(self) -> list[int]:
        """The tokens that are learnt, end to end."""
        return [token for span in self.learnt for token in self.token_ids[span.start : span.end]]


def without_prefix(token_ids: list[int], prefix: list[int]) -> tuple[int, list[int]]:
    """(how many tokens of `prefix` are left out, the others): all of them if `token_ids` begins with it, else none."""
    shared = len(prefix) if token_ids[: len(prefix)] == prefix else 0
    return shared, token_ids[shared:]


OF_AGENTS = "agent/"  # begins the names of numbers of episodes, among the extra numbers and the counters
AUDIT = "audit"  # extra number of a sample: that of the held-out reward
REWARD_ERROR = "reward_error"  # extra number, 1.0, of a sample on which the reward function failed


@dataclass(frozen=True)
class Sample:
    """What the policy wrote for a prompt, and its reward: a completion, or an episode of many turns.

    The sequence of a sample is the tokens that it learns, row after row.  Rows stand in the order of time: of the
    first turn that each learns.  Where turns of several rows alternate, what walks along the sequence (the place of the
    reward, returns, GAE) follows the turns.
    """

    prompt: Prompt
    rows: tuple[Row, ...]
    reward: float  # in total, those of single turns included
    reward_extra: dict[str, float] = field(default_factory=dict)  # extra numbers of the reward function
    greedy_reward: float | None = None  # of a greedy completion of the same prompt, if one was requested
    text: str = ""  # what a reader sees: the completion, or all rows of an episode
    truncated: bool = False  # whether a limit of the run ended it
    pred: str | None = None  # the answer that the reward function has read, by which answers vote

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        completion: Completion,
        reward: float,
        reward_extra: Mapping[str, float] | None = None,
        greedy_reward: float | None = None,
        pred: str | None = None,
    ) -> Sample:
        """One completion of a prompt: one row."""
        row = Row.of(prompt.token_ids, completion)
        truncated = completion.finish_reason == "length"
        return cls(prompt, (row,), reward, dict(reward_extra or {}), greedy_reward, completion.text, truncated, pred)

    def __post_init__(self) -> None:
        uid, turns = self.prompt.uid, [span.turn for row in self.rows for span in row.learnt]
        assert self.rows, f"the sample of prompt {uid} has no row"
        assert len(set(turns)) == len(turns), f"the sample of prompt {uid} learns a turn twice: {turns}"
        first = [row.learnt[0].turn for row in self.rows]
        assert first == sorted(first), f"the rows of a sample of prompt {uid} are not in the order of time: {first}"
        with_rewards = sum(bool(row.rewards) for row in self.rows)
        assert with_rewards in (0, len(self.rows)), f"some turns of the sample of prompt {uid} have no reward"

    @property
    def num_learnt(self) -> int:
        """Tokens that the policy wrote; each is learnt once."""
        return sum(row.num_learnt for row in self.rows)

    @property
    def learnt_ids(self) -> list[int]:
        """The sample's sequence."""
        return [token for row in self.rows for token in row.learnt_ids]

    @property
    def num_turns(self) -> int:
        """Answers of the policy."""
        return sum(len(row.learnt) for row in self.rows)

    @property
    def takes_turns(self) -> bool:
        """Whether a row learns a turn between those of an earlier row."""
        turns = [span.turn for row in self.rows for span in row.learnt]
        return turns != sorted(turns)

    @property
    def finish_reason(self) -> str:
        """Of the answer that began last."""
        return max(self.rows, key=lambda row: row.learnt[-1].turn).finish_reason

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """The weights that wrote each part of the sequence: positions in it."""
        spans, at = [], 0
        for row in self.rows:
            spans += [VersionSpan(span.version, at + span.start, at + span.end) for span in row.versions]
            at += row.num_learnt
        return tuple(spans)


@dataclass(frozen=True)
class LostRollout:
    """A prompt without completions: a value, not an exception, so that one failed request does not stop a run."""

    prompt: Prompt
    reason: str
    unscored: int = 0  # completions that no reward could score; 0: the generation failed


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
        """[N] int64: the sample that each token belongs to."""
        return segment_ids(self.rows)[self.row_ids]

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
class LossOutput:
    """The result of a loss function for one micro-batch: a scalar to differentiate, and statistics."""

    loss: Tensor  # [] the sum of weight * token_loss over the micro-batch
    stats: Stats
