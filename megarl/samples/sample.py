"""What the rollout makes, from `Prompt` to `LostRollout`, in the order in which it is made.

Without torch, whose import takes longer than all else that a process of rewards or agents needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One question.  Example: Prompt("0-17", [12, 34], "12+34=", "46", "arithmetic")."""

    uid: str  # epoch and row of the file: the same row in two epochs gives two groups
    token_ids: list[int]
    text: str | list[dict[str, Any]]  # as in the file: a string, or chat messages
    ground_truth: Any = None  # as the row has it: a text, a number, a list, a mapping; None: it has none
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)  # all other fields of the row, for the reward


def line_of(message: Mapping[str, Any]) -> str:
    """A chat message as "role: content", with its calls of tools as JSON."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return f"{message['role']}: {' '.join([*filter(None, [message['content']]), *calls])}"


def text_of(truth: Any) -> str:
    """A ground truth as text, for files and built-in rewards: a column of floats has 46.0 for 46, of decimals 46.00.

    >>> text_of("046"), text_of(46.0), text_of(0.5), text_of({"target": ["a"]})
    ('046', '46', '0.5', '{"target": ["a"]}')
    """
    if isinstance(truth, Decimal) and truth.is_finite():
        text = f"{truth:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    if isinstance(truth, (int, float, Decimal)) and not isinstance(truth, bool):
        return str(int(truth) if isinstance(truth, float) and truth.is_integer() else truth)
    return truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)


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
AUDIT_ERROR = "audit_error"  # extra number, 1.0, of a sample on which that one failed
REWARD_ERROR = "reward_error"  # extra number, 1.0, of a sample on which the reward function failed
# What stands beside a reward's own numbers in files, metrics and settings.
_TAKEN = {AUDIT, AUDIT_ERROR, REWARD_ERROR, "reward", "score", "uid", "set", "unscored"}
_TAKEN |= {"overlong_penalty", "overlong_share", "overlong_filtered"}


def own_name(name: str) -> str:
    """The name of a reward's own number among the extra numbers, so that it replaces nothing else.

    >>> own_name("length"), own_name("reward"), own_name("agent/turns")
    ('length', 'extra/reward', 'extra/agent/turns')
    """
    return f"extra/{name}" if name in _TAKEN or name.startswith(OF_AGENTS) else name


@dataclass(frozen=True)
class Sample:
    """What the policy generated for a prompt, and its reward: a completion, or an episode of many turns.

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
    # What was said in an episode, by agents/episodes.py; empty for a completion, and if the agent asked with ids.
    messages: list[dict[str, Any]] = field(default_factory=list)

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
        """Tokens that the policy generated; each is learnt once."""
        return sum(row.num_learnt for row in self.rows)

    @property
    def response_length(self) -> int:
        """Tokens behind the prompt of each row, what tools said included."""
        return sum(len(row.token_ids) - row.learnt[0].start for row in self.rows)

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
        """The weights that generated each part of the sequence: positions in it."""
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
