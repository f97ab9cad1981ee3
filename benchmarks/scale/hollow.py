"""Stand-ins for machines and ranks: processes that speak the tree's protocol and hold no model.

Hollow machines are many agents and relays in one thread, which answer for their ranks at once: with them the driver's
side is measured as it is, at thousands of ranks.  A real relay and real followers without a model show what those cost.
"""

from __future__ import annotations

import multiprocessing
import os
import selectors
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megarl import __version__
from megarl.algo.loss import ActorLoss
from megarl.group.follow import Answer, follow
from megarl.group.message import Message, Place, Setup
from megarl.processes.channels.connection import Connection, ConnectionLost, Tensors, connect, to_bytes
from megarl.processes.channels.links import Relay
from megarl.processes.channels.waiting import HEARTBEAT_S
from megarl.processes.lifetime import die_with_parent
from megarl.processes.ranks import ADDRESS, PARENT, TOKEN
from megarl.roles.messages import Update

LIMIT_S = 120.0
UPDATE = Update("actor", 1.0, False, None, ActorLoss(), num_tokens=1 << 20, limits=None, notes=())


@dataclass(frozen=True)
class Nothing(Message):
    """Take what comes, as much as with an optimizer step; give so many bytes."""

    up: int = 0
    like: Update = UPDATE


def start(target: Any, *arguments: Any) -> Any:
    """A process of these stand-ins, which ends with this one; torch is imported once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "benchmarks.scale.hollow"])
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def processor_s(pid: int) -> float:
    """Seconds that the living threads of a process have run, to the nanosecond; one that ends takes its time along."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    total = 0
    for task in tasks:
        with suppress(FileNotFoundError):  # the thread has ended meanwhile
            total += int(task.read_text().split()[0])
    return total / 1e9


def reply_of(rank: int, call: dict[str, Any], replica: int) -> tuple[dict[str, Any], bytes]:
    """What a rank without a model says."""
    up, is_last = call["arguments"].get("up", 0), rank % replica == replica - 1
    place = asdict(Place(rank // replica, is_last)) if call["method"] == Setup.method() else {}
    tensors = {"x": torch.zeros(up, dtype=torch.uint8)} if is_last and up else None
    return {"id": call["id"], "ok": True, "result": place, "seconds": 0.0}, to_bytes(tensors)


class Machines:
    """Agents of machines 1 to `num`, and the relays that they open; `per_node` ranks on each."""

    def __init__(self, address: str, token: str, num: int, per_node: int, replica: int) -> None:
        self._address, self._token = address, token
        self._per_node, self._replica = per_node, replica
        self._ready = selectors.DefaultSelector()
        self._agents: list[Connection] = []
        self._relays = 0
        for node in range(1, num + 1):
            connection = self._call({"node": node, "host": "hollow", "version": __version__})
            self._agents.append(connection)
            self._ready.register(connection.sock, selectors.EVENT_READ, (connection, node, True))

    def serve(self) -> None:
        """Until the driver sends them away."""
        next_beat = 0.0
        while self._agents:
            for key, _ in self._ready.select(timeout=0.2):
                connection, node, is_agent = key.data
                try:
                    (self._obey if is_agent else self._answer)(connection, node)
                    while connection.has_more:
                        (self._obey if is_agent else self._answer)(connection, node)
                except ConnectionLost:
                    self._forget(connection)
            if time.monotonic() > next_beat:
                next_beat = time.monotonic() + HEARTBEAT_S
                for connection in self._agents:
                    with suppress(ConnectionLost):
                        connection.send({"beat": 1})

    def _call(self, hello: dict[str, Any]) -> Connection:
        """The driver may not listen yet, or be greeting too many."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                return connect(self._address, self._token, hello, timeout_s=LIMIT_S)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _forget(self, connection: Connection) -> None:
        self._ready.unregister(connection.sock)
        connection.close()
        if connection in self._agents:
            self._agents.remove(connection)

    def _obey(self, connection: Connection, node: int) -> None:
        order, _ = connection.receive()
        if order.get("do") == "leave":
            raise ConnectionLost("sent away")
        if "do" not in order:
            return
        answer: dict[str, Any] = {"id": order["id"], "pid": 0, "words": ""}
        if order["do"] == "ports":
            answer["ports"] = [1] * len(order["hosts"])
        elif order["do"] == "ranks":
            relay = self._call({"relay": order["job"]})
            self._ready.register(relay.sock, selectors.EVENT_READ, (relay, node, False))
            for rank in self._ranks(node):
                relay.send({"rank": rank, "here": True, "host": "hollow", "pid": 0})
        connection.send(answer)

    def _ranks(self, node: int) -> range:
        return range((node - 1) * self._per_node, node * self._per_node)

    def _answer(self, relay: Connection, node: int) -> None:
        header, _ = relay.receive_bytes()
        if header["call"]["method"] == "close":
            return
        for rank in self._ranks(node):
            said, body = reply_of(rank, header["call"], self._replica)
            relay.send_bytes({**said, "rank": rank}, [body])


def machines(address: str, token: str, num: int, per_node: int, replica: int) -> None:
    """The process of all hollow machines."""
    _become_child()
    Machines(address, token, num, per_node, replica).serve()


def relay(address: str, token: str, num_ranks: int, told: Any) -> None:
    """A machine's relay, as an agent has it; says where its ranks call."""
    _become_child()
    made = Relay(connect(address, token, {}, timeout_s=LIMIT_S), num_ranks)
    told.send((made.address, made.token))
    told.poll(None)  # until the other end is closed
    made.close()


def follower(address: str, token: str, rank: int) -> None:
    """A rank that follows and has nothing to do."""
    _become_child()
    os.environ.update({"RANK": str(rank), ADDRESS: address, TOKEN: token, PARENT: str(os.getppid())})
    follow({Nothing: nothing}, lambda: _Alone(), lambda: True)


def nothing(message: Nothing, _: Tensors) -> Answer:
    return {}, {"x": torch.zeros(message.up, dtype=torch.uint8)} if message.up else {}


class _Alone:
    """The process group of a replica of one."""

    def size(self) -> int:
        return 1


def _become_child() -> None:
    torch.set_num_threads(1)
    die_with_parent(os.getppid())  # the fork server, which ends with who started it
