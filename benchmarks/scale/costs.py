"""What one message of a Group's call costs each process that it passes, measured with the real code of megarl/group.

The driver's side is a real Group over real Nodes whose machines are hollow; the relay's and a rank's side are a real
Relay with real followers that have no model.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.scale import hollow
from benchmarks.scale.hollow import Nothing
from benchmarks.scale.simulation import Costs, Leader
from megarl.arch.layout import Layout
from megarl.group import Group
from megarl.machines.nodes import Nodes
from megarl.processes.channels.connection import greet
from megarl.processes.channels.links import Direct, Inbox, Link, Relayed
from megarl.servers.server_process import free_ports

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Call:
    """A call of all ranks, as the driver saw it; medians but for the last."""

    seconds: float
    leader_s: float  # that the driver's thread worked
    others_s: float = 0.0  # that the threads of the other processes worked, all together; a mean


@contextmanager
def hollow_group(num_nodes: int, per_node: int, logs: Path, replica: int = 1) -> Iterator[tuple[Group, int]]:
    """A real Group whose ranks are all on hollow machines, and the process id of these."""
    (port,), token = free_ports([HOST]), secrets.token_hex(16)
    process = hollow.start(hollow.machines, f"{HOST}:{port}", token, num_nodes, per_node, replica)
    try:
        with Nodes(num_nodes + 1, per_node, HOST, port, token) as nodes:
            nodes.wait(limit_s=300.0)
            ranks = num_nodes * per_node
            with Group("hollow", ranks, Layout(), log_dir=logs, nodes=nodes, first_rank=per_node) as group:
                group.start()
                yield group, process.pid
    finally:
        process.kill()
        process.join()


def timed_calls(call: Callable[[], object], repeats: int, pids: tuple[int, ...] = ()) -> Call:
    """Medians over calls, after a first one that does not count."""
    call()
    walls, own, others = [], [], sum(map(hollow.processor_s, pids))
    for _ in range(repeats):
        begun, begun_own = time.perf_counter(), time.thread_time()
        call()
        walls.append(time.perf_counter() - begun)
        own.append(time.thread_time() - begun_own)
    others = sum(map(hollow.processor_s, pids)) - others
    return Call(median(walls), median(own), others / repeats)


def hollow_call(group: Group, pid: int, repeats: int, *, down: int = 0, up: int = 0) -> Call:
    """With so many bytes of tensors to and from every replica."""
    payloads = [{"x": torch.zeros(down, dtype=torch.uint8)}] * group.num_replicas if down else None
    return timed_calls(lambda: group.call(Nothing(up), payloads), repeats, (pid,))


def leader_costs(logs: Path, *, nodes: int, per_node: int, num_bytes: int, repeats: int) -> tuple[Costs, Costs]:
    """The driver's costs, and those of hollow machines as relays: from one machine, many, and many with more ranks."""
    with hollow_group(1, 1, logs) as (group, pid):
        alone = hollow_call(group, pid, repeats)
    with hollow_group(nodes, 1, logs) as (group, pid):
        one = hollow_call(group, pid, repeats)
    with hollow_group(nodes, per_node, logs, replica=per_node) as (group, pid):
        many = hollow_call(group, pid, repeats)
        down = hollow_call(group, pid, max(3, repeats // 4), down=num_bytes)
        up = hollow_call(group, pid, max(3, repeats // 4), up=num_bytes)
    more = nodes * (per_node - 1)
    take, carry = (max(0.0, b - a) / more for a, b in ((one.leader_s, many.leader_s), (one.others_s, many.others_s)))
    pair, whole = max(0.0, one.leader_s - alone.leader_s) / (nodes - 1), nodes * num_bytes
    leader = Costs(
        call=max(0.0, alone.leader_s - pair),
        send=max(0.0, pair - take),
        take=take,
        send_byte=max(0.0, down.leader_s - many.leader_s) / whole,
        take_byte=max(0.0, up.leader_s - many.leader_s) / whole,
    )
    byte = max(0.0, down.others_s - many.others_s) / whole
    return leader, Costs(relay_in=max(0.0, one.others_s / nodes - carry), relay_up=carry, relay_byte=byte)


@dataclass
class _Below:
    """Links to followers, and the processes that they lead to."""

    links: list[Link]
    relay: int | None
    ranks: list[int]
    num_ranks: int

    def call(self, down: int = 0, up: int = 0) -> None:
        header = {"id": 1, "method": Nothing.method(), "arguments": asdict(Nothing(up)), "has_payload": bool(down)}
        payloads = dict.fromkeys(range(self.num_ranks), {"x": torch.zeros(down, dtype=torch.uint8)}) if down else {}
        for link in self.links:
            link.send(header, payloads)
        missing = self.num_ranks
        with Inbox(self.links) as inbox:
            while missing:
                for message in inbox.messages(hollow.LIMIT_S):
                    said = message.header
                    assert said is not None and said.get("ok", True), f"a follower failed: {said}"
                    missing -= "beat" not in said


@contextmanager
def followers(num: int, *, relayed: bool) -> Iterator[_Below]:
    """Real followers, one by one or behind a real relay."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((HOST, 0)))
        listener.settimeout(hollow.LIMIT_S)
        address, token = f"{HOST}:{listener.getsockname()[1]}", secrets.token_hex(16)
        links: list[Link] = []
        pids: list[int] = []

        def begin(target: Any, *arguments: Any) -> int:
            process = hollow.start(target, *arguments)
            stack.callback(process.join)
            stack.callback(process.kill)
            return int(process.pid)

        if relayed:
            ours, theirs = multiprocessing.Pipe()
            stack.callback(ours.close)
            relay = begin(hollow.relay, address, token, num, theirs)
            arrival = greet(listener.accept()[0], token)
            assert arrival is not None, "the relay has our token"
            upward = Relayed(arrival[0], tuple(range(num)))
            home, key = ours.recv()
            pids += [begin(hollow.follower, home, key, rank) for rank in range(num)]
            links.append(upward)
            upward.connection.sock.settimeout(hollow.LIMIT_S)
            if sorted(upward.receive().rank for _ in range(num)) != list(range(num)):
                raise RuntimeError("a follower did not come, or came twice")
            upward.connection.sock.settimeout(None)
            yield _Below(links, relay, pids, num)
            return
        for rank in range(num):
            pids.append(begin(hollow.follower, address, token, rank))
            arrival = greet(listener.accept()[0], token)
            assert arrival is not None, "a follower has our token"
            links.append(Direct(arrival[0], rank))
        yield _Below(links, None, pids, num)


def below_costs(*, per_node: int, num_bytes: int, repeats: int) -> Costs:
    """Those of a relay and of a rank.  A relay sends once down for each rank, and takes and sends once up."""
    with followers(1, relayed=True) as one, followers(per_node, relayed=True) as many:
        assert one.relay is not None and many.relay is not None
        single = timed_calls(one.call, repeats, (one.relay,)).others_s
        several = timed_calls(many.call, repeats, (many.relay,)).others_s
        heavy = timed_calls(lambda: many.call(down=num_bytes), max(3, repeats // 4), (many.relay,)).others_s
        rank = timed_calls(many.call, repeats, tuple(many.ranks)).others_s / per_node
        loaded = timed_calls(lambda: many.call(down=num_bytes), max(3, repeats // 4), tuple(many.ranks)).others_s
    each = max(0.0, several - single) / (per_node - 1)
    return Costs(
        relay_in=max(0.0, single - each),
        relay_down=each / 3,
        relay_up=2 * each / 3,
        relay_byte=max(0.0, heavy - several) / (2 * per_node * num_bytes),  # a byte comes, and goes
        rank=rank,
        rank_byte=max(0.0, loaded / per_node - rank) / num_bytes,
    )


def hop_s(repeats: int) -> float:
    """How long a message is under way on this machine: half of a call to one rank, less the work."""
    with followers(1, relayed=False) as below:
        found = timed_calls(below.call, repeats, tuple(below.ranks))
    return max(0.0, found.seconds - found.leader_s - found.others_s) / 2


def together(leader: Costs, below: Costs) -> Costs:
    """One table of both: what `leader` leaves at 0 is that of `below`."""
    return replace(below, **{name: value for name, value in asdict(leader).items() if value})


def leader_holds(logs: Path, *, nodes: int, per_node: int) -> Leader:
    """Memory, sockets and threads of this process, by what so many hollow machines take more than one.

    A first group, whose numbers do not count, loads and allocates what any group does.
    """
    held: list[tuple[int, int, int]] = []
    for num in (nodes, 1, nodes):
        with hollow_group(num, per_node, logs) as (group, _):
            group.call(Nothing())
            held.append(_held())
    memory, sockets, threads = ((b - a) / (nodes - 1) for a, b in zip(*held[1:], strict=True))
    return Leader(base_bytes=held[1][0] - memory, node_bytes=memory, node_sockets=sockets, node_threads=threads)


def _held() -> tuple[int, int, int]:
    process = psutil.Process(os.getpid())
    return process.memory_info().rss, process.num_fds(), process.num_threads()
