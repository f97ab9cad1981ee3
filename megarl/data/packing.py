"""Sequence packing and load balancing: which sequences share a micro-batch, and which rank runs it.

All ranks run the same number of micro-batches, because gradient reduction and expert all-to-all wait for all ranks.
The k-th micro-batches of all ranks have about the same cost, and so do the ranks' sums.  A micro-batch without
sequences is a dummy: the rank runs a row of weight 0.  Packing never changes a result, only the time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np
import torch
from torch import Tensor

from megarl.samples.batch import token_positions

_EVENING_PASSES = 3


@dataclass(frozen=True)
class RankPlan:
    """One rank's sequences, micro-batch after micro-batch.  Example: RankPlan([4, 0, 2], [2, 1, 0])."""

    indices: list[int]  # which sequences of the batch, in the order in which they run
    micro_sizes: list[int]  # sequences of each micro-batch; 0 is a dummy

    @property
    def micro_batches(self) -> list[list[int]]:
        """The sequences of each micro-batch."""
        ends = np.cumsum(self.micro_sizes)
        return [self.indices[end - size : end] for end, size in zip(ends, self.micro_sizes, strict=True)]


@dataclass(frozen=True)
class PrefixGroup:
    """Sequences that are packed together, because a row that has them all needs fewer places."""

    members: list[int]  # sequences of the batch
    size: int  # places that they take together, at most
    cost: int  # see `cost_of`


def cost_of(lengths: np.ndarray, hidden_size: int) -> np.ndarray:
    """The cost of sequences of these lengths: L * (12 * hidden_size + L).

    Per token, the operations of the linear layers and of causal attention have the ratio 24 h^2 to 2 h L.
    """
    return lengths * (12 * hidden_size + lengths)


def plan(
    lengths: Sequence[int],
    num_ranks: int,
    *,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    hidden_size: int = 1024,
    groups: Sequence[PrefixGroup] | None = None,
) -> list[RankPlan]:
    """Distribute sequences of these lengths over `num_ranks` ranks: few micro-batches first, then even costs.

    A micro-batch holds at most `max_tokens` tokens, or at most `max_sequences` sequences; give one of the two.
    `groups`: of all sequences, none larger than a micro-batch; those of one stay together, and tokens are places.
    Raises ValueError if a single sequence exceeds `max_tokens`.
    """
    assert (max_tokens is None) != (max_sequences is None), "give max_tokens or max_sequences, not both"
    size = np.asarray(lengths, dtype=np.int64)
    if max_tokens is not None and len(size) and size.max() > max_tokens:
        raise ValueError(
            f"ppo_max_token_len_per_gpu={max_tokens}: sequence {int(size.argmax())} has {int(size.max())} tokens; "
            "expected a limit of at least data.max_prompt_length + data.max_response_length, or of agent.max_tokens "
            "with agents"
        )
    cost, members = cost_of(size, hidden_size), [[index] for index in range(len(size))]
    if groups is not None:
        members = [group.members for group in groups]
        size, cost = (np.asarray([getattr(x, name) for x in groups], dtype=np.int64) for name in ("size", "cost"))
    if max_tokens is not None:
        bins = _bins(np.argsort(-size, kind="stable"), size, cost, num_ranks, max_tokens)
    else:
        assert max_sequences is not None and max_sequences > 0, f"max_sequences is {max_sequences}, expected 1 or more"
        count = np.asarray([len(own) for own in members], dtype=np.int64)
        bins = _bins(np.lexsort((-size, -count)), count, cost, num_ranks, max_sequences)
    return _deal(bins, cost, members, num_ranks)


def unpack(plans: Sequence[RankPlan], parts: Sequence[Tensor], lengths: Sequence[int] | Tensor) -> Tensor:
    """Undo a plan for a column: parts[r], the tokens of rank r in its order -> [N, ...] in the order of the batch."""
    order = torch.tensor([index for rank in plans for index in rank.indices], dtype=torch.int64)
    flat = torch.cat(list(parts))
    all_lengths = torch.as_tensor(lengths, dtype=torch.int64)
    assert len(order) == len(all_lengths), f"plans hold {len(order)} sequences, the batch {len(all_lengths)}"
    assert len(flat) == int(all_lengths.sum()), f"parts hold {len(flat)} tokens, the batch {int(all_lengths.sum())}"
    places = token_positions(all_lengths, order)
    return flat[torch.empty_like(places).index_copy(0, places, torch.arange(len(places)))]  # torch writes no uint16


def _bins(
    longest_first: np.ndarray, size: np.ndarray, cost: np.ndarray, num_ranks: int, capacity: int
) -> list[list[int]]:
    """The fewest bins, a multiple of the ranks, that `_even_bins` or `_best_fit` finds, with even costs if possible."""
    fewest = _round_up(-(-int(size.sum()) // capacity), num_ranks)
    if (even := _even_bins(longest_first, size, cost, fewest, capacity)) is not None:
        return even
    tight = _best_fit(longest_first, size, capacity)
    num_bins = _round_up(len(tight), num_ranks)
    if num_bins > fewest and (even := _even_bins(longest_first, size, cost, num_bins, capacity)) is not None:
        return even
    return _evened(tight + [[] for _ in range(num_bins - len(tight))], size, cost, capacity)


def _best_fit(longest_first: np.ndarray, size: np.ndarray, capacity: int) -> list[list[int]]:
    """Best-fit-decreasing: each sequence goes where it leaves the least room; at most 11/9 of the optimal count."""
    bins: list[list[int]] = []
    rooms: list[int] = []  # free tokens of the bins, each number once, sorted
    having: dict[int, list[int]] = {}  # free tokens -> a heap of the bins with this number
    for index, need in zip(longest_first.tolist(), size[longest_first].tolist(), strict=True):
        at = bisect_left(rooms, need)
        if at == len(rooms):
            left, target = capacity, len(bins)
            bins.append([])
        else:
            left = rooms[at]
            target = heappop(having[left])
            if not having[left]:
                del having[left], rooms[at]
        bins[target].append(index)
        left -= need
        if left not in having:
            having[left] = []
            insort(rooms, left)
        heappush(having[left], target)
    return bins


def _even_bins(
    longest_first: np.ndarray, size: np.ndarray, cost: np.ndarray, num_bins: int, capacity: int
) -> list[list[int]] | None:
    """Longest first, each into the cheapest bin with room; None if a sequence fits into no bin.

    A bin without room is set aside until sequences are short enough for it, so that the heap's first bin always fits.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [capacity] * num_bins
    cheapest = [(0, target) for target in range(num_bins)]  # a heap of (cost so far, bin)
    full: list[tuple[int, int, int]] = []  # a heap of (-room, cost so far, bin)
    sequences = zip(longest_first.tolist(), size[longest_first].tolist(), cost[longest_first].tolist(), strict=True)
    for index, need, price in sequences:
        while full and -full[0][0] >= need:
            _, spent, target = heappop(full)
            heappush(cheapest, (spent, target))
        while cheapest and room[cheapest[0][1]] < need:
            spent, target = heappop(cheapest)
            heappush(full, (-room[target], spent, target))
        if not cheapest:
            return None
        spent, target = cheapest[0]
        bins[target].append(index)
        room[target] -= need
        heapreplace(cheapest, (spent + price, target))
    return bins


def _evened(bins: list[list[int]], size: np.ndarray, cost: np.ndarray, capacity: int) -> list[list[int]]:
    """Move sequences between expensive and cheap bins, within the capacity; the number of bins stays."""
    needs, prices = size.tolist(), cost.tolist()
    totals = [sum(prices[i] for i in members) for members in bins]
    for _ in range(_EVENING_PASSES):
        by_cost = sorted(range(len(bins)), key=totals.__getitem__)
        for cheap, dear in zip(by_cost[: len(bins) // 2], reversed(by_cost), strict=False):
            members = sorted(bins[cheap] + bins[dear], key=lambda i: (-needs[i], i))
            if (halves := _halves(members, needs, prices, capacity, below=totals[dear])) is not None:
                bins[cheap], bins[dear] = halves
                totals[cheap], totals[dear] = (sum(prices[i] for i in half) for half in halves)
    return bins


def _halves(
    longest_first: list[int], needs: list[int], prices: list[int], capacity: int, *, below: int
) -> tuple[list[int], list[int]] | None:
    """Two bins, each sequence in the cheaper one if it fits; None if that fails or one costs `below` or more."""
    one: list[int] = []
    other: list[int] = []
    room, other_room, spent, other_spent = capacity, capacity, 0, 0
    for index in longest_first:
        need, price = needs[index], prices[index]
        if room >= need and (spent <= other_spent or other_room < need):
            one.append(index)
            room, spent = room - need, spent + price
        elif other_room >= need:
            other.append(index)
            other_room, other_spent = other_room - need, other_spent + price
        else:
            return None
    return (one, other) if max(spent, other_spent) < below else None


def _deal(bins: list[list[int]], cost: np.ndarray, members: list[list[int]], num_ranks: int) -> list[RankPlan]:
    """Bins of similar cost run at the same time; in each such round the rank with the lowest sum gets the costliest.

    Expensive rounds come first, so that a lack of memory shows at once.
    """
    prices = cost.tolist()
    totals = [sum(prices[i] for i in chosen) for chosen in bins]
    dearest_first = sorted(range(len(bins)), key=lambda b: (-totals[b], b))
    rank_cost = [0] * num_ranks
    rank_bins: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(bins), num_ranks):
        cheapest_ranks = sorted(range(num_ranks), key=lambda r: (rank_cost[r], r))
        for rank, chosen in zip(cheapest_ranks, dearest_first[start : start + num_ranks], strict=True):
            rank_bins[rank].append(sorted(index for i in bins[chosen] for index in members[i]))
            rank_cost[rank] += totals[chosen]
    return [
        RankPlan([i for together in mine for i in together], [len(together) for together in mine]) for mine in rank_bins
    ]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
