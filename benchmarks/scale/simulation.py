"""A small discrete model of a Group's call: the driver, one relay for each other machine, and the ranks.

A message is handled by one process after another; each process handles one message at a time, and where processes share
a machine's cores they wait for a core.  What one message costs is measured (`costs.py`); how long it is on the way
and how wide the driver's link is are assumed for a cluster and measured for this machine.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

LEADER = "leader"


@dataclass(frozen=True)
class Costs:
    """Seconds of a process's time for one message, and for one byte of tensors."""

    call: float = 0.0  # the driver: a call, whoever takes it
    send: float = 0.0  # the driver: a call to one rank of its machine, or to one relay
    take: float = 0.0  # the driver: the answer of one rank
    relay_in: float = 0.0  # a relay: a call comes
    relay_down: float = 0.0  # a relay: the call to one rank
    relay_up: float = 0.0  # a relay: the answer of one rank
    rank: float = 0.0  # a rank: a call in, its answer out
    send_byte: float = 0.0  # the driver: tensors into bytes, and to the kernel
    take_byte: float = 0.0
    relay_byte: float = 0.0
    rank_byte: float = 0.0


@dataclass(frozen=True)
class Way:
    """How messages travel."""

    hop_s: float  # from the driver to another process, on the way
    inner_s: float = 0.0  # from a relay to a rank beside it
    bytes_per_s: float = float("inf")  # of the driver's link
    cores: int | None = None  # that all processes share; None: each has its own
    one_relay: bool = False  # one process is all relays, as that of hollow machines


@dataclass(frozen=True)
class Tree:
    """Who is below the driver.  Example: Tree(16, per_node=8) has 8 ranks beside the driver and a relay with 8."""

    num_ranks: int
    per_node: int = 8
    replica: int = 1  # ranks of one replica: its first one takes tensors, its last one returns them
    beside: bool = True  # the driver's machine has ranks too

    @property
    def direct(self) -> range:
        """Ranks that the driver speaks to without a relay."""
        return range(min(self.per_node, self.num_ranks) if self.beside else 0)

    @property
    def relays(self) -> list[range]:
        """The ranks of each other machine."""
        starts = range(len(self.direct), self.num_ranks, self.per_node)
        return [range(first, min(first + self.per_node, self.num_ranks)) for first in starts]

    @property
    def num_replicas(self) -> int:
        return max(1, self.num_ranks // self.replica)

    def bytes_down(self, ranks: range, each: int) -> int:
        """Of tensors for these ranks, with so many bytes a replica."""
        return each * sum(rank % self.replica == 0 for rank in ranks)

    def bytes_up(self, rank: int, each: int) -> int:
        return each if rank % self.replica == self.replica - 1 else 0


@dataclass(frozen=True)
class Outcome:
    seconds: float  # from the call to the last answer
    leader_s: float  # of which the driver worked


class _Run:
    """One call; events are taken in the order of their time, so a process serves whoever came first."""

    def __init__(self, tree: Tree, costs: Costs, way: Way, down: int, up: int) -> None:
        self.tree, self.costs, self.way, self.down, self.up = tree, costs, way, down, up
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._free: dict[str, float] = {}
        self._cores = [0.0] * (way.cores or 0)
        self._line_free = 0.0
        self._early: deque[int] | None = deque()  # answers that came while the driver was still sending
        self._answers, self._leader_s, self.end = 0, 0.0, 0.0

    def __call__(self) -> Outcome:
        links = deque([range(rank, rank + 1) for rank in self.tree.direct] + self.tree.relays)
        begun = self._work(LEADER, 0.0, self.costs.call)
        self._at(begun, partial(self._send, links=links, direct=len(self.tree.direct)))
        while self._events:
            time, _, action = heapq.heappop(self._events)
            action(time)
        assert self._answers == self.tree.num_ranks, f"{self._answers} answers of {self.tree.num_ranks}"
        return Outcome(self.end, self._leader_s)

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, action))

    def _work(self, who: str, time: float, seconds: float) -> float:
        """When the process has done it: as soon as it is free, and a core for it."""
        start = max(time, self._free.get(who, 0.0))
        if self._cores:
            start = max(start, heapq.heappop(self._cores))
            heapq.heappush(self._cores, start + seconds)
        self._free[who] = start + seconds
        if who == LEADER:
            self._leader_s += seconds
        return start + seconds

    def _over_line(self, time: float, num_bytes: int) -> float:
        """When the bytes have left, or entered, the driver's machine."""
        if num_bytes:
            time = self._line_free = max(time, self._line_free) + num_bytes / self.way.bytes_per_s
        return time

    def _send(self, time: float, links: deque[range], direct: int) -> None:
        ranks = links.popleft()
        size = self.tree.bytes_down(ranks, self.down)
        done = self._work(LEADER, time, self.costs.send + size * self.costs.send_byte)
        if direct > 0:
            self._at(done + self.way.hop_s, partial(self._rank, rank=ranks.start, relay=None))
        else:
            self._at(self._over_line(done, size) + self.way.hop_s, partial(self._relay, ranks=ranks, size=size))
        if links:
            self._at(done, partial(self._send, links=links, direct=direct - 1))
        else:
            self._at(done, self._listen)

    def _listen(self, time: float) -> None:
        early, self._early = self._early or deque(), None
        for rank in early:
            self._take(time, rank)

    def _relay(self, time: float, ranks: range, size: int) -> None:
        who = "relay" if self.way.one_relay else f"relay {ranks.start}"
        done = self._work(who, time, self.costs.relay_in + size * self.costs.relay_byte)
        for rank in ranks:
            share = self.tree.bytes_down(range(rank, rank + 1), self.down)
            done = self._work(who, done, self.costs.relay_down + share * self.costs.relay_byte)
            self._at(done + self.way.inner_s, partial(self._rank, rank=rank, relay=who))

    def _rank(self, time: float, rank: int, relay: str | None) -> None:
        size = self.tree.bytes_down(range(rank, rank + 1), self.down) + self.tree.bytes_up(rank, self.up)
        done = self._work(f"rank {rank}", time, self.costs.rank + size * self.costs.rank_byte)
        if relay is None:
            self._at(done + self.way.hop_s, partial(self._take, rank=rank))
        else:
            self._at(done + self.way.inner_s, partial(self._carry, rank=rank, relay=relay))

    def _carry(self, time: float, rank: int, relay: str) -> None:
        size = self.tree.bytes_up(rank, self.up)
        done = self._work(relay, time, self.costs.relay_up + size * self.costs.relay_byte)
        self._at(self._over_line(done, size) + self.way.hop_s, partial(self._take, rank=rank))

    def _take(self, time: float, rank: int) -> None:
        if self._early is not None:
            self._early.append(rank)
            return
        size = self.tree.bytes_up(rank, self.up)
        self.end = self._work(LEADER, time, self.costs.take + size * self.costs.take_byte)
        self._answers += 1


def call(tree: Tree, costs: Costs, way: Way, *, down: int = 0, up: int = 0) -> Outcome:
    """A call of all ranks, with tensors of so many bytes to and from each replica."""
    return _Run(tree, costs, way, down, up)()


@dataclass(frozen=True)
class Leader:
    """What the driver's process holds; measured with many machines that are hollow."""

    base_bytes: float
    node_bytes: float  # for each other machine: two connections, a thread, what is known of it
    node_sockets: float
    node_threads: float

    def memory(self, tree: Tree) -> float:
        return self.base_bytes + len(tree.relays) * self.node_bytes

    def sockets(self, tree: Tree) -> int:
        return round(len(tree.relays) * self.node_sockets) + len(tree.direct)
