"""The driver's connections to the ranks of a group: directly on its own machine, through a relay on another."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from megarl.processes.connection import Connection, ConnectionLost, Tensors, from_bytes, to_bytes


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
        self._connection, self.ranks = connection, (rank,)

    @property
    def sock(self) -> socket.socket:
        return self._connection.sock

    def send(self, header: dict[str, Any], payloads: Mapping[int, Tensors]) -> None:
        self._connection.send(header, payloads.get(self.ranks[0]))

    def receive(self) -> RankMessage:
        try:
            return RankMessage(self.ranks[0], *self._connection.receive())
        except ConnectionLost:
            return RankMessage(self.ranks[0], None, {})

    def close(self) -> None:
        self._connection.close()


class Relayed:
    """The connection to all ranks of a group on another machine; a call is sent once over the network for all."""

    def __init__(self, connection: Connection, ranks: tuple[int, ...]) -> None:
        self._connection, self.ranks = connection, ranks

    @property
    def sock(self) -> socket.socket:
        return self._connection.sock

    def send(self, header: dict[str, Any], payloads: Mapping[int, Tensors]) -> None:
        bodies = {rank: to_bytes(payloads[rank]) for rank in self.ranks if rank in payloads}
        sizes = [[rank, len(body)] for rank, body in bodies.items()]
        self._connection.send_bytes({"call": header, "sizes": sizes}, list(bodies.values()))

    def receive(self) -> RankMessage:
        try:
            header, body = self._connection.receive_bytes()
        except ConnectionLost as error:
            return RankMessage(self.ranks[0], None, {}, lost=str(error))
        rank = int(header.pop("rank"))
        return RankMessage(rank, None if header.get("gone") else header, from_bytes(body))

    def close(self) -> None:
        self._connection.close()


Link = Direct | Relayed
