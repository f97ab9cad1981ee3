"""Ways to spread sequences over ranks and micro-batches, written plainly: what megarl.data.packing is held against.

A way takes lengths and costs, the number of ranks and the tokens that a micro-batch may hold, and gives for each rank
its micro-batches as lists of sequences.  Every rank has equally many of them, since the ranks wait for each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from megarl.data.packing import plan

Dealt = list[list[list[int]]]  # ranks -> micro-batches -> sequences


@dataclass(frozen=True)
class Task:
    """What is to be packed.  Example: Task([5, 4, 3], [65, 50, 40], num_ranks=2, max_tokens=8, hidden_size=1)."""

    lengths: list[int]
    costs: list[int]
    num_ranks: int
    max_tokens: int
    hidden_size: int


def megarl(task: Task) -> Dealt:
    """The fewest micro-batches that even placing or best-fit-decreasing finds, dealt in rounds of like cost."""
    plans = plan(task.lengths, task.num_ranks, max_tokens=task.max_tokens, hidden_size=task.hidden_size)
    return [rank.micro_batches for rank in plans]


def karmarkar_karp(task: Task) -> Dealt:
    """Largest differencing twice: sequences over ranks, then each rank's into the fewest micro-batches that all fit."""
    ranks = largest_differencing(range(len(task.lengths)), task.costs, task.num_ranks)
    tokens = [sum(task.lengths[i] for i in mine) for mine in ranks]
    rounds = max(1, -(-max(tokens) // task.max_tokens))
    while True:
        dealt = [largest_differencing(mine, task.costs, rounds) for mine in ranks]
        if all(_fits(task, members) for mine in dealt for members in mine):
            return [sorted(mine, key=lambda members: -sum(task.costs[i] for i in members)) for mine in dealt]
        rounds += max(1, rounds // 50)


def largest_differencing(items: Sequence[int], costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Karmarkar and Karp's method for `num_parts` parts: join the two most uneven partial solutions, again and again.

    A partial solution lists its parts that are not empty, dearest first; joining adds the dearest of one to the
    cheapest of the other.
    """
    serial = count()
    heap = [_entry([(costs[i], [i])], num_parts, next(serial)) for i in items]
    heapq.heapify(heap)
    while len(heap) > 1:
        one = heapq.heappop(heap)[2]
        other = heapq.heappop(heap)[2]
        heapq.heappush(heap, _entry(_joined(one, other, num_parts), num_parts, next(serial)))
    parts = heap[0][2] if heap else []
    return [members for _, members in parts] + [[] for _ in range(num_parts - len(parts))]


def first_fit(task: Task) -> Dealt:
    """Each sequence, as it comes, into the first micro-batch with room; dealt out in turn."""
    return _in_turn(_first_fit(range(len(task.lengths)), task), task.num_ranks)


def first_fit_decreasing(task: Task) -> Dealt:
    """The same, longest sequences first."""
    order = sorted(range(len(task.lengths)), key=lambda i: -task.lengths[i])
    return _in_turn(_first_fit(order, task), task.num_ranks)


def padded(task: Task) -> Dealt:
    """No packing: sequences of like length in rows that are filled up to the longest."""
    bins: list[list[int]] = []
    for i in sorted(range(len(task.lengths)), key=lambda i: -task.lengths[i]):
        if not bins or task.lengths[bins[-1][0]] * (len(bins[-1]) + 1) > task.max_tokens:
            bins.append([])
        bins[-1].append(i)
    return _in_turn(bins, task.num_ranks)


WAYS: dict[str, Callable[[Task], Dealt]] = {
    "megarl": megarl,
    "karmarkar_karp": karmarkar_karp,
    "first_fit": first_fit,
    "first_fit_decreasing": first_fit_decreasing,
    "padded": padded,
}


def _entry(
    parts: list[tuple[int, list[int]]], num_parts: int, serial: int
) -> tuple[int, int, list[tuple[int, list[int]]]]:
    """In the heap's order: most uneven first, of equals the oldest."""
    cheapest = parts[-1][0] if len(parts) == num_parts else 0
    return cheapest - parts[0][0], serial, parts


def _joined(
    one: list[tuple[int, list[int]]], other: list[tuple[int, list[int]]], num_parts: int
) -> list[tuple[int, list[int]]]:
    overlap = max(0, len(one) + len(other) - num_parts)  # the rest of each meets an empty part of the other
    out = one[: len(one) - overlap] + other[: len(other) - overlap]
    met = zip(reversed(one[len(one) - overlap :]), other[len(other) - overlap :], strict=True)
    out += [(a[0] + b[0], a[1] + b[1]) for a, b in met]
    return sorted(out, key=lambda part: -part[0])


def _first_fit(order: Sequence[int], task: Task) -> list[list[int]]:
    """A tree over the rooms of all micro-batches, the larger of two on top, leads to the first one that is enough."""
    width = 1 << max(1, len(task.lengths) - 1).bit_length()
    room = [task.max_tokens] * (2 * width)
    bins: list[list[int]] = []
    for i in order:
        need, at = task.lengths[i], 1
        while at < width:
            at *= 2
            at += room[at] < need
        if at - width == len(bins):
            bins.append([])
        bins[at - width].append(i)
        room[at] -= need
        while at > 1:
            at //= 2
            room[at] = max(room[2 * at], room[2 * at + 1])
    return bins


def _in_turn(bins: list[list[int]], num_ranks: int) -> Dealt:
    missing = -len(bins) % num_ranks
    bins = bins + [[] for _ in range(missing)]
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def _fits(task: Task, members: Sequence[int]) -> bool:
    return sum(task.lengths[i] for i in members) <= task.max_tokens
