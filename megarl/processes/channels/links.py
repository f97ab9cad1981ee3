"""The driver's connections to the ranks of a group: directly on its own machine, through a relay on another.

A relay sends each call of the driver to all ranks of its machine.  The driver's message to it holds the header of a
call and, concatenated, the payloads of the ranks that get one, which the relay does not change.  It sends the messages
of a rank to the driver with the number of the rank.
"""

from __future__ import annotations

import secrets
import selectors
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

from megarl.io.sockets import listen
from megarl.processes.channels.connection import Connection, ConnectionLost, Tensors, from_bytes, to_bytes
from megarl.processes.channels.listener import Listener


class RankMessage(NamedTuple):
    """A message of a rank; `header` is None if the rank has ended.

    `lost`: its machine cannot be reached any more, for this reason; then all its ranks count as ended.
    """

    rank: int
    header: dict[str, Any] | None
    tensors: Tensors
    lost: str = ""


class Direct:
    """The connection to a rank on this machine."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self.connection, self.ranks = connection, (rank,)

    def send(self, header: dict[str, Any], payloads: Mapping[int, Tensors]) -> None:
        self.connection.send(header, payloads.get(self.ranks[0]))

    def receive(self) -> RankMessage:
        try:
            return RankMessage(self.ranks[0], *self.connection.receive())
        except ConnectionLost:
            return RankMessage(self.ranks[0], None, {})


class Relayed:
    """The connection to all ranks of a group on another machine; a call is sent once over the network for all."""

    def __init__(self, connection: Connection, ranks: tuple[int, ...]) -> None:
        self.connection, self.ranks = connection, ranks

    def send(self, header: dict[str, Any], payloads: Mapping[int, Tensors]) -> None:
        bodies = {rank: to_bytes(payloads[rank]) for rank in self.ranks if rank in payloads}
        sizes = [[rank, len(body)] for rank, body in bodies.items()]
        self.connection.send_bytes({"call": header, "sizes": sizes}, list(bodies.values()))

    def receive(self) -> RankMessage:
        try:
            header, body = self.connection.receive_bytes()
        except ConnectionLost as error:
            return RankMessage(self.ranks[0], None, {}, lost=str(error))
        rank = int(header.pop("rank"))
        return RankMessage(rank, None if header.get("gone") else header, from_bytes(body))


Link = Direct | Relayed


class Inbox:
    """What comes from some links.  Example: with Inbox(links) as inbox: for message in inbox.messages(0.5): ..."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._sockets = selectors.DefaultSelector()
        for link in links:
            self._sockets.register(link.connection.sock, selectors.EVENT_READ, link)
        self._have_more = [link for link in links if link.connection.has_more]  # received before, for another reader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sockets.close()

    def messages(self, timeout_s: float) -> Iterator[RankMessage]:
        """Those that have begun to come, or the first that does within the limit."""
        ready = self._have_more or [key.data for key, _ in self._sockets.select(timeout_s)]
        self._have_more = []
        for link in ready:
            yield (message := link.receive())
            while message.header is not None and link.connection.has_more:
                yield (message := link.receive())


class Relay:
    """Example: relay = Relay(upward, num_ranks=8); RanksProcess(launch, relay.address, relay.token); ...; relay.close()

    Its threads end with the connection to the driver; the ranks end with their connections to the relay.
    """

    def __init__(self, upward: Connection, num_ranks: int) -> None:
        self._up, self._num_ranks = upward, num_ranks
        self.token = secrets.token_hex(16)
        self._ranks: dict[int, Connection] = {}
        self._closed = threading.Event()
        listener = listen("127.0.0.1")
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self._listener = Listener(listener, self.token, self._carry_up, name="relay")
        threading.Thread(target=self._carry_down, daemon=True, name="relay down").start()

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        self._up.close()
        for connection in list(self._ranks.values()):
            connection.close()

    def _carry_up(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Accept a rank, report it and forward its messages; stop listening when all ranks are connected."""
        rank = int(hello["rank"])
        self._ranks[rank] = connection
        if len(self._ranks) == self._num_ranks:
            self._listener.close()
        if self._closed.is_set():
            connection.close()  # the relay was closed in the meantime
        with suppress(ConnectionLost):  # the driver is gone: `_carry_down` handles it
            self._up.send({**hello, "here": True})
            try:
                while True:
                    header, body = connection.receive_bytes()
                    self._up.send_bytes({**header, "rank": rank}, [body])
            except ConnectionLost:
                self._up.send({"rank": rank, "gone": True})

    def _carry_down(self) -> None:
        try:
            while True:
                header, body = self._up.receive_bytes()
                self._pass_on(header["call"], dict(header["sizes"]), memoryview(body))
        except ConnectionLost:
            self.close()

    def _pass_on(self, call: dict[str, Any], sizes: dict[int, int], payloads: memoryview) -> None:
        """`sizes`: rank -> bytes, in the order of the payloads."""
        parts: dict[int, memoryview] = {}
        begin = 0
        for rank, size in sizes.items():
            parts[rank] = payloads[begin : begin + size]
            begin += size
        for rank, connection in list(self._ranks.items()):
            with suppress(ConnectionLost):  # `_carry_up` reports it to the driver
                connection.send_bytes(call, [parts[rank]] if rank in parts else [])
