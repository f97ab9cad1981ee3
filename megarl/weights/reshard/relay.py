"""Executes the transfers of plans inside the trainer's world, for servers whose ranks stand beside the trainer's.

NCCL joins no two processes of one GPU.  So a rank of the trainer receives for each server rank beside it (its guest),
into memory that both map: while the guest reads one half, the next message comes into the other.  The two talk over
gloo: one byte says that a message is there, one that it was read.  A guest that fails is not written for any more, but
its messages are still taken off the others, whose transfers do not depend on it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.weights.clock import Clock
from megarl.weights.reshard.exchange import (
    Known,
    Link,
    ParamOf,
    Step,
    begin,
    digest_buffers,
    digests_in,
    encoded,
    fill,
    finish,
    halves,
    hear,
    where,
)
from megarl.weights.reshard.transfers import ALIGNMENT, Message
from megarl.weights.verify.digests import Hash

Seat = tuple[str, int]  # a server's URL, and the number of one of its ranks
Place = tuple[int, int]  # of a message, see MessageSchedule


class Guest:
    """A server rank as the trainer's rank beside it sees it."""

    def __init__(self, rank: int, messages: Sequence[Message], new: Callable[[int], Tensor]) -> None:
        """`messages`: all that the server rank needs.  `new` makes memory that both map, from its bytes."""
        self.rank = rank
        self.messages = messages
        largest = max((message.num_bytes for message in messages), default=0)
        self.buffer = new(2 * -(-max(1, largest) // ALIGNMENT) * ALIGNMENT)
        self.link: Link | None = None  # to the server's rank, by the number of any sender
        self.error: RuntimeError | None = None  # the first one between the two
        self._taken = 0
        self._read: deque[list[dist.Work]] = deque()  # until each message that was handed over is read

    def half(self) -> Tensor:
        """Where the next message comes; waits until the one before the last was read from there."""
        if self._taken >= 2:
            self._try(lambda link: finish(self._read.popleft(), link))
        self._taken += 1
        return halves(self.buffer)[(self._taken - 1) % 2]

    def hand_over(self, message: Message) -> None:
        """It has come into the half that was taken for it."""
        token, answer = torch.zeros(2, dtype=torch.uint8).split(1)
        ops = [(dist.isend, token, message.peer), (dist.irecv, answer, message.peer)]
        self._try(lambda link: self._read.append(begin(ops, link)))

    def differing(self, sent: Mapping[int, Iterator[str]]) -> list[str]:
        """Descriptions of the parts whose digest here is not what their senders say; empty after an error."""
        held: dict[int, Iterator[str]] = {}
        self._try(lambda link: held.update(hear(self.messages, link)))
        if self.error is not None:
            return []
        parts = [(message.peer, part) for message in self.messages for part in message.parts]
        return [where(part, self.rank) for peer, part in parts if next(held[peer]) != next(sent[peer])]

    def _try(self, step: Callable[[Link], None]) -> None:
        if self.link is None or self.error is not None:
            return
        try:
            step(self.link)
        except RuntimeError as error:
            self.error = error


def relay(
    outgoing: Sequence[tuple[Place, Seat, Message]],
    incoming: Sequence[tuple[Place, Seat, Message]],
    guests: Mapping[Seat, Guest],
    hosts: Mapping[Seat, int],
    world: Link,
    param_of: ParamOf,
    clock: Clock,
) -> dict[Seat, list[Hash]]:
    """Send this rank's messages to the hosts of their receivers, and receive those of its own guests.

    All ranks go from place to place in one order; two places are under way at a time.  Returns the hashes of the parts
    that this rank has sent to each seat.  No parameter may change before.
    """
    me = dist.get_rank()
    steps: dict[Place, tuple[list[tuple[Seat, Message]], list[tuple[Seat, Message]]]] = defaultdict(lambda: ([], []))
    for i, messages in enumerate((outgoing, incoming)):
        for place, seat, message in messages:
            steps[place][i].append((seat, message))
    sent: dict[Seat, list[Hash]] = defaultdict(list)
    known: Known = {}
    largest = max((message.num_bytes for _, seat, message in outgoing if hosts[seat] != me), default=0)
    buffers = cycle([torch.empty(largest, dtype=torch.uint8, device=world.device) for _ in range(2)])
    under_way: tuple[list[dist.Work], list[tuple[Seat, Message]]] = ([], [])

    def complete() -> None:
        works, come = under_way
        finish(works, world)
        if come and world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # what this rank has copied there itself
        for seat, message in come:
            guests[seat].hand_over(message)

    for place in sorted(steps):
        leaving, coming = steps[place]
        ours = {seat: guests[seat].half() for seat, _ in coming}
        ops: list[Step] = [
            (dist.irecv, ours[seat][: each.num_bytes], each.peer) for seat, each in coming if each.peer != me
        ]
        for seat, message in leaving:  # one at most
            buffer = ours[seat] if hosts[seat] == me else next(buffers)
            sent[seat] += fill(message, buffer, param_of, world.hashes, known, clock)
            if hosts[seat] != me:
                ops.append((dist.isend, buffer[: message.num_bytes], hosts[seat]))
        works = begin(ops, world)
        complete()
        under_way = (works, coming)
    complete()
    return sent


def compare_at_hosts(
    sent: Mapping[Seat, Sequence[str]], guests: Mapping[Seat, Guest], hosts: Mapping[Seat, int], world: Link
) -> dict[Seat, list[str]]:
    """Tell the hosts the digests of what was sent, and compare those of this rank's guests with what these hold.

    Returns the descriptions of the parts that differ, for each guest.
    """
    me = dist.get_rank()
    raw = {seat: encoded("".join(digests), world.device) for seat, digests in sent.items()}
    told = {seat: digest_buffers(guest.messages, world) for seat, guest in guests.items()}
    ops: list[Step] = [(dist.isend, raw[seat], hosts[seat]) for seat in sorted(raw) if hosts[seat] != me]
    ops += [(dist.irecv, told[seat][peer], peer) for seat in sorted(told) for peer in sorted(told[seat]) if peer != me]
    finish(begin(ops, world), world)
    for seat, of_peers in told.items():
        if me in of_peers:
            of_peers[me] = raw[seat]
    return {
        seat: guests[seat].differing({peer: digests_in(text) for peer, text in of_peers.items()})
        for seat, of_peers in told.items()
    }
