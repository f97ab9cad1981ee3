"""Relay between the driver and the ranks of a group on another machine: sends each call of the driver to all ranks.

The driver's message holds a call's header and, concatenated, the payloads of the ranks that get one; payloads are
passed on unchanged.  Messages of a rank are sent to the driver with its rank number.
"""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress
from typing import Any

from megarl.network.sockets import listen
from megarl.processes.connection import Connection, ConnectionLost
from megarl.processes.listener import Listener


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
