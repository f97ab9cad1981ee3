"""The plan of a resharding: which rank sends which slice of which HF tensor to which rank, from two shardings.

Every rank derives the plan by itself.  The boxes on each side are cut until any two are equal or disjoint; each
non-empty intersection of a sender's cell and a receiver's cell is a region.  So every byte is in one region of every
receiver that needs it, and is sent to it once, even if the receiver keeps it at two places.  The senders that hold a
region share the copies to send in equal runs of rows; a small region is sent whole by one of them, chosen by the
tensor's number.  Both ranks of a pair list its transfers in the same order, so messages need no names.

This file does not communicate: `exchange` moves the bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from megarl.arch.boxes import Box, box_size, contains, intersect, refine
from megarl.weights.mapping.names import some_names
from megarl.weights.reshard.describe import fingerprint
from megarl.weights.reshard.sharding import Holding, ParameterSlice, Sharding
from megarl.weights.reshard.transfers import Message, MessageSchedule, Transfer, inside, itemsize, pack_all

MIN_CUT_BYTES = 1 << 20  # a region smaller than this is sent whole
_TENSORS_AT_ONCE = 1024


class Plan:
    """The transfers from the ranks of one sharding to those of another; a peer is a rank number of the other sharding.

    Raises ValueError with the names if one side lacks a tensor of the other, or has it in another shape.
    """

    def __init__(self, sender: Sharding, receiver: Sharding, *, min_cut_bytes: int = MIN_CUT_BYTES) -> None:
        self.sender = sender
        self.receiver = receiver
        self._min_cut_bytes = min_cut_bytes
        _check_same_tensors(sender, receiver)
        self._schedule = MessageSchedule(max(sender.num_ranks, receiver.num_ranks))
        self._numbers = {name: i for i, name in enumerate(sender.tensors)}

    def fingerprint(self, message_bytes: int) -> str:
        """64 hex digits of everything that both sides must agree on before the first byte is sent."""
        return fingerprint(self.sender, self.receiver, self._min_cut_bytes, message_bytes)

    def sends(self, rank: int) -> list[Transfer]:
        """What sender `rank` sends, in the order of tensors."""
        own, found = self.sender.owned(rank), []
        for region in self._regions(own, holder=rank):
            param_slices = own[region.name]
            for position, needer in enumerate(region.needers):
                for holder, box in self._shares(region, position):
                    if holder == rank:
                        found.append(
                            Transfer(needer, region.name, box, _param_slices(param_slices, box)[:1], region.dtype)
                        )
        return found

    def receives(self, rank: int) -> list[Transfer]:
        """What receiver `rank` receives, in the order of tensors."""
        own, found = self.receiver.owned(rank), []
        for region in self._regions(own, needer=rank):
            param_slices = own[region.name]
            for holder, box in self._shares(region, region.needers.index(rank)):
                found.append(Transfer(holder, region.name, box, _param_slices(param_slices, box), region.dtype))
        return found

    def num_bytes(self, rank: int) -> int:
        """Bytes that receiver `rank` has to write: each byte of its parameters that belongs to an HF tensor, once."""
        tensors, owned = self.receiver.tensors, self.receiver.owned(rank)
        return sum(
            box_size(box) * itemsize(tensors[name].dtype)
            for name, param_slices in owned.items()
            for box, _ in param_slices
        )

    def messages_out(self, rank: int, message_bytes: int) -> list[Message]:
        """What sender `rank` sends, in messages of at most `message_bytes`, in the order of its own schedule."""
        messages = pack_all(self.sends(rank), message_bytes)
        return sorted(messages, key=lambda message: self._schedule.place(message, rank, message.peer))

    def messages_in(self, rank: int, message_bytes: int) -> list[Message]:
        """The same messages for receiver `rank`, in the same order."""
        messages = pack_all(self.receives(rank), message_bytes)
        return sorted(messages, key=lambda message: self._schedule.place(message, message.peer, rank))

    def _regions(
        self, names: Iterable[str], *, holder: int | None = None, needer: int | None = None
    ) -> Iterator[_Region]:
        """The regions of these tensors that sender `holder` holds, or that receiver `needer` needs, in order."""
        in_order = sorted(names, key=self._numbers.__getitem__)
        for first in range(0, len(in_order), _TENSORS_AT_ONCE):
            some = in_order[first : first + _TENSORS_AT_ONCE]
            held, needed = self.sender.holdings(some), self.receiver.holdings(some)
            for name in some:
                dtype = self.receiver.tensors[name].dtype
                for theirs, ours in product(_cells(held[name], holder), _cells(needed[name], needer)):
                    if (box := intersect(theirs.box, ours.box)) is not None:
                        yield _Region(name, self._numbers[name], dtype, box, theirs.ranks, ours.ranks)

    def _shares(self, region: _Region, position: int) -> Iterator[tuple[int, Box]]:
        """(sender, box) of each part of the copy for the receiver at `position` among those that need the region.

        The rows of all copies, one copy after another, are distributed over the senders in equal runs.
        """
        num_bytes = box_size(region.box) * itemsize(region.dtype)
        start, stop = region.box[0]
        rows = stop - start if num_bytes >= self._min_cut_bytes else 1  # 1: nothing to cut
        total, num_holders = rows * len(region.needers), len(region.holders)
        active = max(1, min(num_holders, total, num_bytes * len(region.needers) // self._min_cut_bytes))
        shift = _scatter(region.number) if active < num_holders else 0
        row, end = position * rows, (position + 1) * rows
        while row < end:
            run = ((row + 1) * active - 1) // total
            until = min(end, (run + 1) * total // active)
            holder = region.holders[(shift + run) % num_holders]
            if rows == 1:
                yield holder, region.box
            else:
                first = start + row - position * rows
                yield holder, ((first, first + until - row), *region.box[1:])
            row = until


class _Region(NamedTuple):
    name: str
    number: int  # of the tensor, in the order of the sender's table
    dtype: str
    box: Box
    holders: tuple[int, ...]
    needers: tuple[int, ...]


class _Cell(NamedTuple):
    box: Box
    ranks: tuple[int, ...]


def _cells(holdings: Sequence[Holding], rank: int | None) -> list[_Cell]:
    """The cells of a tensor on one side, in order; `rank`: only those that it has."""
    cells_of = refine(tuple(holding.box for holding in holdings))
    ranks: dict[Box, list[int]] = defaultdict(list)
    for holding in holdings:
        for cell in cells_of[holding.box]:
            ranks[cell] += holding.ranks
    return [
        _Cell(box, tuple(sorted(set(members))))
        for box, members in sorted(ranks.items())
        if rank is None or rank in members
    ]


def _param_slices(owned: Sequence[tuple[Box, ParameterSlice]], box: Box) -> tuple[ParameterSlice, ...]:
    return tuple(inside(param_slice, outer, box) for outer, param_slice in owned if contains(outer, box))


def _check_same_tensors(sender: Sharding, receiver: Sharding) -> None:
    ours, theirs = sender.tensors, receiver.tensors
    lacking = [name for name in theirs if name not in ours]
    unwanted = [name for name in ours if name not in theirs]
    differ = [
        f"{name} {list(tensor.shape)} and {list(theirs[name].shape)}"
        for name, tensor in ours.items()
        if name in theirs and theirs[name].shape != tensor.shape
    ]
    parts = [
        ("only the receivers have", lacking),
        ("only the senders have", unwanted),
        ("of different shapes are", differ),
    ]
    faults = [f"{what} {some_names(names)}" for what, names in parts if names]
    if faults:
        raise ValueError(f"senders and receivers do not hold the same model: {'; '.join(faults)}")


def _scatter(number: int) -> int:
    """Hash of a tensor's number that spreads consecutive tensors, and the same tensor of all layers, over senders."""
    return (number * 2654435761 & 0xFFFFFFFF) >> 8
