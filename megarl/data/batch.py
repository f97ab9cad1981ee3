"""Makes one ragged Batch from scored groups, and splits its samples into the mini-batches of its optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.samples.batch import Batch
from megarl.samples.ragged import Ragged, names_in_batch
from megarl.samples.sample import REWARD_ERROR, Row, Sample, own_name


def make_batch(groups: Sequence[Sequence[Sample]], *, reward_parts: Sequence[str] = ()) -> Batch:
    """All samples of all groups, concatenated, each with all its rows.

    columns [N]
        response_mask       float32, 1 on the learnt tokens: each token that the policy generated, once
        rollout_log_probs   float32, as the server reported them; 0 on the context
        versions            int32, of the weights that generated the token; -1 on the context
        turn                int32, the turn that generated the token; -1 on the context; if turns of some rows alternate
        turn_rewards        float32, the reward of a turn on its last token, 0 elsewhere; if a sample has such rewards
    and the rows' own columns [N, ...], of their dtypes; a ragged one as two, see ragged.py
    per_sequence [S]
        score               float32, the reward
        group               int64, index into `groups`: samples of one visit of one prompt
        version_min, version_max   int64, oldest and newest weights that generated a token
        truncated           float32, 1 if a limit of the run ended the sample
        greedy_score        float32, the reward of a greedy completion, if all samples have one
        reward_parts        [S, K] float32, the numbers of the reward that `reward_parts` names, if any

    Raises: ValueError for a number of the reward that not all samples have.
    """
    samples = [sample for group in groups for sample in group]
    assert samples, "a batch needs at least one sample"
    rows = [row for sample in samples for row in sample.rows]
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
    num_tokens = int(lengths.sum())
    tokens = np.fromiter(chain.from_iterable(row.token_ids for row in rows), dtype=np.int64, count=num_tokens)
    learnt = _learnt(rows, lengths)
    num_learnt = int(learnt.sum())

    written = chain.from_iterable(row.log_probs for row in rows)
    log_probs = np.zeros(num_tokens, dtype=np.float32)
    log_probs[learnt] = np.fromiter(written, dtype=np.float32, count=num_learnt)
    spans = np.array([(s.version, s.end - s.start) for row in rows for s in row.versions], dtype=np.int32)
    versions = np.full(num_tokens, -1, dtype=np.int32)
    versions[learnt] = np.repeat(spans[:, 0], spans[:, 1])
    num_spans = np.array([sum(len(row.versions) for row in sample.rows) for sample in samples], dtype=np.int64)
    first_spans, by_span = num_spans.cumsum() - num_spans, spans[:, 0].astype(np.int64)

    names = sample_names(groups)
    own = {"response_mask": learnt.astype(np.float32), "rollout_log_probs": log_probs, "versions": versions}
    if any(sample.takes_turns for sample in samples):
        own["turn"] = _turns(rows, lengths)
    if any(row.rewards for row in rows):
        own["turn_rewards"] = _turn_rewards(rows, lengths)
    batch = Batch(
        tokens=torch.from_numpy(tokens),
        lengths=torch.from_numpy(lengths),
        columns={name: torch.from_numpy(column) for name, column in own.items()} | _carried(samples, names, lengths),
        per_sequence={
            "score": torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
            "group": torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(g) for g in groups])),
            "version_min": torch.from_numpy(np.minimum.reduceat(by_span, first_spans)),
            "version_max": torch.from_numpy(np.maximum.reduceat(by_span, first_spans)),
            "truncated": torch.tensor([float(sample.truncated) for sample in samples]),
        },
        rows=torch.tensor([len(sample.rows) for sample in samples]),
    )
    greedy = [sample.greedy_reward for sample in samples if sample.greedy_reward is not None]
    if len(greedy) == len(samples):
        batch = batch.with_per_sequence(greedy_score=torch.tensor(greedy, dtype=torch.float32))
    if reward_parts:
        values = [[_part(s, key, name) for key in reward_parts] for s, name in zip(samples, names, strict=True)]
        batch = batch.with_per_sequence(reward_parts=torch.tensor(values, dtype=torch.float32))
    return batch


def sample_names(groups: Sequence[Sequence[Sample]]) -> list[str]:
    """The name of each sample in a batch of these groups: the prompt's uid and the place in the group, "0-17#2"."""
    return [f"{sample.prompt.uid}#{at}" for group in groups for at, sample in enumerate(group)]


def mini_batches(batch: Batch, prompts_per_step: int, *, seed: int | None) -> list[list[int]]:
    """The samples of each optimizer step of one epoch: whole prompt groups, `prompts_per_step` of them in each.

    If the number of groups is not a multiple, because rollouts were lost, the number of steps is rounded up and their
    sizes differ by at most one group, so that no step has only a few groups.
    `seed` shuffles the groups (None: keeps their order).  A single step keeps their order too: its passes then pack
    the sequences as those over the batch do, and compute the same bits.
    """
    assert prompts_per_step > 0, "a step needs at least one prompt"
    members: dict[int, list[int]] = {}
    for sample, index in enumerate(batch.per_sequence["group"].tolist()):
        members.setdefault(index, []).append(sample)
    names = list(members)
    num_steps = -(-len(names) // prompts_per_step)
    if seed is not None and num_steps > 1:
        names = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    steps = np.array_split(np.arange(len(names)), num_steps)
    return [[sample for at in step for sample in members[names[at]]] for step in steps]


def _part(sample: Sample, key: str, name: str) -> float:
    """One of the numbers that a reward function returned; 0 if it failed.  "reward" is its own one, else the whole."""
    own = own_name(key)
    if key == "reward" and own not in sample.reward_extra:
        return sample.reward
    if REWARD_ERROR in sample.reward_extra:
        return 0.0
    if own not in sample.reward_extra:
        has = ", ".join(["reward", *sample.reward_extra])
        raise ValueError(
            f"algorithm.reward_weights.{key}: the reward of sample {name} has no number of that name; expected one "
            f"that reward.fn returns for every sample (here: {has})"
        )
    return sample.reward_extra[own]


def _learnt(rows: Sequence[Row], lengths: np.ndarray) -> np.ndarray:
    """[N] bool: the tokens that are learnt in their row."""
    edges = np.zeros(int(lengths.sum()) + 1, dtype=np.int8)
    for row, begin in zip(rows, (lengths.cumsum() - lengths).tolist(), strict=True):
        for span in row.learnt:  # a span may begin where another ends
            edges[begin + span.start] += 1
            edges[begin + span.end] -= 1
    return edges[:-1].cumsum(dtype=np.int8) == 1


def _turns(rows: Sequence[Row], lengths: np.ndarray) -> np.ndarray:
    """[N] int32: the turn of each learnt token, -1 on the context."""
    turns = np.full(int(lengths.sum()), -1, dtype=np.int32)
    for row, begin in zip(rows, (lengths.cumsum() - lengths).tolist(), strict=True):
        for span in row.learnt:
            turns[begin + span.start : begin + span.end] = span.turn
    return turns


def _turn_rewards(rows: Sequence[Row], lengths: np.ndarray) -> np.ndarray:
    """[N] float32: the reward of each turn on its last token."""
    rewards = np.zeros(int(lengths.sum()), dtype=np.float32)
    for row, begin in zip(rows, (lengths.cumsum() - lengths).tolist(), strict=True):
        for span, reward in zip(row.learnt, row.rewards, strict=bool(row.rewards)):
            rewards[begin + span.end - 1] = reward
    return rewards


def _carried(samples: Sequence[Sample], names: Sequence[str], lengths: np.ndarray) -> dict[str, Tensor]:
    """The columns of the rows, [N, ...] each: replies have those for which the run asks.  `lengths`: of the rows."""
    named = [(name, row) for sample, name in zip(samples, names, strict=True) for row in sample.rows]
    columns: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for _, row in named for name in row.columns):
        parts = [row.columns.get(name) for _, row in named]
        kinds = ["no such column" if p is None else f"{p.dtype} {['N', *p.shape[1:]]}" for p in parts]
        for (sample, _), kind in zip(named, kinds, strict=True):
            assert kind == kinds[0], f"column {name}: sample {sample} has {kind}, sample {names[0]} {kinds[0]}"
        column: Any = np.concatenate([part for part in parts if part is not None])
        if isinstance(column, Ragged):
            columns |= zip(names_in_batch(name), column.spread(lengths), strict=True)
        else:
            columns[name] = torch.from_numpy(column)
    return columns
