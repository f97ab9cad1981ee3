"""The slices that two ranks exchange, packed into messages; both ranks derive the same messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from megarl.arch.boxes import Box, box_shape, box_size, cut
from megarl.weights.mapping.names import Shape
from megarl.weights.reshard.sharding import ParameterSlice

ALIGNMENT = 16  # bytes; alignment of parts in a message, so that they can be viewed as tensors of any type


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of an HF tensor that goes to, or comes from, one rank of the other side.

    Example: Transfer(3, "model.norm.weight", ((0, 64),), (ParameterSlice("decoder.final_layernorm.weight", None,
    (0,)),), "bfloat16").  A sender reads one slice, a receiver fills all of them.
    """

    peer: int
    hf_name: str
    box: Box
    param_slices: tuple[ParameterSlice, ...]
    dtype: str  # the type in which it is sent: the receiver's

    @property
    def shape(self) -> Shape:
        return box_shape(self.box)

    @property
    def num_bytes(self) -> int:
        return box_size(self.box) * itemsize(self.dtype)

    def part(self, box: Box) -> Transfer:
        """The transfer of a box inside this one."""
        return replace(
            self, box=box, param_slices=tuple(inside(param_slice, self.box, box) for param_slice in self.param_slices)
        )


@dataclass(frozen=True, slots=True)
class Message:
    """Transfers of one pair of ranks that are sent together, and the byte at which each starts."""

    peer: int
    number: int  # among the messages of its pair
    parts: tuple[Transfer, ...]
    starts: tuple[int, ...]
    num_bytes: int


def inside(param_slice: ParameterSlice, outer: Box, inner: Box) -> ParameterSlice:
    """Where `inner` is in the parameter, if `outer` is at `param_slice`."""
    start = (at + i[0] - o[0] for at, o, i in zip(param_slice.start, outer, inner, strict=True))
    return replace(param_slice, start=tuple(start))


@dataclass(frozen=True, slots=True)
class MessageSchedule:
    """The order of messages: in each turn every sender has one receiver, and every receiver one sender.

    Receivers are counted over all servers, and `first` is the number of a server's rank 0.  After the last turn come
    the second messages of all pairs, and so on.  The place of a message is the same for both of its ranks, and no rank
    has two messages at one place.  So ranks that process their messages in this order never wait in a circle.
    """

    count: int
    first: int = 0

    def place(self, message: Message, sender: int, receiver: int) -> tuple[int, int]:
        return message.number, (self.first + receiver - sender) % self.count


def pack_all(transfers: Iterable[Transfer], message_bytes: int) -> list[Message]:
    """The messages of one rank with all its peers."""
    by_peer: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_peer[transfer.peer].append(transfer)
    return [message for theirs in by_peer.values() for message in pack(theirs, message_bytes)]


def pack(transfers: Iterable[Transfer], message_bytes: int) -> Iterator[Message]:
    """The transfers of one pair in messages of at most `message_bytes`; a larger transfer is cut."""
    if message_bytes < ALIGNMENT:
        raise ValueError(f"message_bytes={message_bytes}: expected at least {ALIGNMENT}")
    parts: list[Transfer] = []
    starts: list[int] = []
    end = number = 0
    for transfer in transfers:
        for box in cut(transfer.box, message_bytes // itemsize(transfer.dtype)):
            part = transfer.part(box)
            start = -(-end // ALIGNMENT) * ALIGNMENT
            if parts and start + part.num_bytes > message_bytes:
                yield Message(transfer.peer, number, tuple(parts), tuple(starts), end)
                parts = []
                starts = []
                start = 0
                number = number + 1
            parts.append(part)
            starts.append(start)
            end = start + part.num_bytes
    if parts:
        yield Message(parts[0].peer, number, tuple(parts), tuple(starts), end)


def itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
