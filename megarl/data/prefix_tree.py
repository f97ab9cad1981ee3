"""Rows that begin alike: which to pack together, and the tree in which each of their common tokens stands once.

The n answers to a prompt have the prompt in common, the rows of an episode their history, and equal answers everything.
A causal model computes the same for a common token in every row, so that a packed row needs it only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megarl.data.packing import PrefixGroup, cost_of
from megarl.samples.batch import Batch
from megarl.samples.sample import SUPPORT, TEACHER_HIDDEN, TEACHER_IDS

MIN_SHARED = 4  # tokens that rows have in common at least for them to be computed once: fewer would save little
# Columns that the model's side of a step reads of the tokens that are learnt.  Two rows may learn the same tokens and
# have other entries, so that with such a column only the context before the first learnt token is shared.
OF_A_ROW = (SUPPORT, TEACHER_HIDDEN, TEACHER_IDS)


@dataclass(frozen=True)
class CommonPrefixes:
    """The rows of a batch in the order of their tokens, and what each has in common with the one before it.

    Example, rows "abcdx", "zz", "abcdy": order [0, 2, 1], common [0, 4, 0].
    """

    order: np.ndarray  # [R] rows
    common: np.ndarray  # [R] leading tokens, of the row at this place of the order; 0: fewer than MIN_SHARED

    @classmethod
    def of(cls, batch: Batch) -> CommonPrefixes:
        tokens, lengths, starts = batch.tokens.numpy(), batch.lengths.numpy(), batch.row_starts.numpy()
        most = _shareable(batch).numpy()
        as_bytes = tokens.astype(">u4").tobytes()  # big-endian numbers sort as their bytes do
        rows = [as_bytes[4 * a : 4 * b] for a, b in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]
        order = np.asarray(sorted(range(len(rows)), key=rows.__getitem__), dtype=np.int64)
        before, after = order[:-1], order[1:]
        counts = np.minimum(most[before], most[after])
        differ = tokens[runs(starts[before], counts)] != tokens[runs(starts[after], counts)]
        differing = np.append(np.flatnonzero(differ), len(differ))
        begins = counts.cumsum() - counts
        found = np.minimum(differing[np.searchsorted(differing, begins)] - begins, counts)
        common = np.zeros(len(order), dtype=np.int64)
        common[1:] = np.where(found >= MIN_SHARED, found, 0)
        return cls(order, common)


def _shareable(batch: Batch) -> Tensor:
    """[R] int64: how many leading tokens of each row other rows may share."""
    if not any(name in batch.columns for name in OF_A_ROW):
        return batch.lengths
    if "response_mask" not in batch.columns:
        return torch.zeros_like(batch.lengths)
    return batch.context_lengths(batch.columns["response_mask"] > 0)


def prefix_groups(
    batch: Batch, num_ranks: int, *, max_tokens: int | None, max_sequences: int | None, hidden_size: int
) -> list[PrefixGroup]:
    """The samples of a batch in groups, each to be packed together.

    A group is cut that has more than `max_tokens` places or `max_sequences` samples, or that costs more than a rank's
    share of the batch.  Where samples have several rows, which stay together anyway, each is alone.
    """
    if len(batch.rows) != len(batch.lengths):
        return [_alone(batch.select([i]), i, hidden_size) for i in range(batch.num_sequences)]
    prefixes = CommonPrefixes.of(batch)
    lengths, order = batch.lengths.numpy()[prefixes.order], prefixes.order.tolist()
    sizes, costs = _of_rows(lengths, prefixes.common, hidden_size)
    most = max(1, int(costs.sum()) // num_ranks)
    edges = [*np.flatnonzero(prefixes.common == 0).tolist(), len(order)]
    groups: list[PrefixGroup] = []
    for first, end in pairwise(edges):
        parts = max(-(-int(costs[first:end].sum()) // most), -(-(end - first) // (max_sequences or end - first)))
        count = -(-(end - first) // parts)
        for at in range(first, end):
            size, cost = int(sizes[at]), int(costs[at])
            last = groups[-1] if groups and at > first else None
            if last is None or len(last.members) == count or (max_tokens is not None and last.size + size > max_tokens):
                groups.append(PrefixGroup([order[at]], int(lengths[at]), int(cost_of(lengths[at], hidden_size))))
            else:
                groups[-1] = PrefixGroup([*last.members, order[at]], last.size + size, last.cost + cost)
    return groups


def _of_rows(lengths: np.ndarray, common: np.ndarray, hidden_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Places at most, and the cost, by which each row in the order of `CommonPrefixes` makes a tree larger.

    A row that leaves the tree inside a node cuts it in two: its second half and the row's rest have one place more.
    """
    sizes = np.where(common > 0, lengths - common + 2, lengths)
    return sizes, cost_of(lengths, hidden_size) - cost_of(common, hidden_size)


def _alone(sample: Batch, index: int, hidden_size: int) -> PrefixGroup:
    prefixes = CommonPrefixes.of(sample)
    lengths = sample.lengths.numpy()[prefixes.order]
    sizes, costs = _of_rows(lengths, prefixes.common, hidden_size)
    return PrefixGroup([index], min(int(sizes.sum()), int(lengths.sum())), int(costs.sum()))


@dataclass(frozen=True)
class PrefixTree:
    """Nodes of tokens that stand in a packed row one after the other, a parent before its children.

    A node continues its parent.  Its first place repeats the parent's last token, because what follows that token
    differs from child to child: this place predicts the child's first token, and takes the parent's last place in what
    the child and its descendants attend to.
    Example, rows "abcdx" and "abcdyz": nodes "abcd", "dx", "dyz".
    """

    parents: np.ndarray  # [nodes] of each node, -1: it has none
    positions: np.ndarray  # [nodes] in its rows, of each node's first place
    lengths: np.ndarray  # [nodes] places
    sources: Tensor  # [T] int64, index in the batch of the token at each place
    targets: Tensor  # [T] int64, index in the batch of the token that each place predicts, -1: of none
    predicts: Tensor  # [N] int64, the place that predicts each token of the batch, -1: none does

    @classmethod
    def of(cls, batch: Batch, prefixes: CommonPrefixes) -> PrefixTree:
        starts, nodes = batch.row_starts.numpy(), list(_nodes(prefixes, batch.lengths.tolist()))
        parents, begins, ends = (np.asarray([node[i] for node in nodes], dtype=np.int64) for i in range(3))
        positions = np.maximum(begins - 1, 0)  # of the repeated token, where there is one
        lengths = ends - positions
        places = lengths.cumsum() - lengths
        sources = runs(starts[[rows[0] for *_, rows in nodes]] + positions, lengths)
        targets = sources + 1
        targets[places + lengths - 1] = -1
        rows = np.concatenate([rows for *_, rows in nodes])
        of_rows = np.repeat(np.arange(len(nodes)), [len(rows) for *_, rows in nodes])
        counts = lengths[of_rows] - 1
        predicts = np.full(batch.num_tokens, -1)
        predicts[runs(starts[rows] + positions[of_rows] + 1, counts)] = runs(places[of_rows], counts)
        return cls(parents, positions, lengths, *map(torch.from_numpy, (sources, targets, predicts)))

    @property
    def places(self) -> np.ndarray:
        """[nodes] of each node's first."""
        return self.lengths.cumsum() - self.lengths

    @property
    def num_places(self) -> int:
        return int(self.lengths.sum())

    @property
    def place_positions(self) -> np.ndarray:
        """[T] of each place in its rows."""
        return runs(self.positions, self.lengths)


def runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... `lengths[0]` of them, then from starts[1], ..."""
    ends = lengths.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


def _nodes(prefixes: CommonPrefixes, lengths: list[int]) -> Iterator[tuple[int, int, int, list[int]]]:
    """(parent, begin, end, rows): tokens [begin, end) of these rows, which the parent's rows have up to `begin`."""
    order, common = prefixes.order.tolist(), prefixes.common
    left = [(0, len(order), 0, -1)]  # (first, behind the last, tokens that the parent has, parent): a stack
    count = 0
    while left:
        low, high, depth, parent = left.pop()
        inner = common[low + 1 : high]
        end = int(inner.min()) if len(inner) else lengths[order[low]]
        if end > depth:
            yield parent, depth, end, order[low:high]
            depth, parent, count = end, count, count + 1
        if not len(inner):
            continue
        parts = np.flatnonzero(inner == end)
        edges = [low, *(parts + low + 1).tolist(), high]
        left += [(a, b, depth, parent) for a, b in zip(edges[-2::-1], edges[:0:-1], strict=True)]
