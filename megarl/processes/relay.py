"""One machine's ranks of a group, between them and the driver: what the driver says once goes to each of them.

The driver's message holds a call's header and, end to end, the payloads of those ranks that get one; a payload is
passed on as it came.  What a rank says goes up with its number.
"""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress
from typing import Any

from megarl.processes.connection import Connection, ConnectionLost, Listener
from megarl.sockets import listen


class Relay:
    """Example: relay = Relay(upward, num_ranks=8); RanksProcess(launch, relay.address, relay.token); ...; relay.close()

    Its threads end with the connection to the driver, and the ranks with theirs to the relay.
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
        """Let a rank in, say so, and pass on what it says; the last one shuts the door."""
        rank = int(hello["rank"])
        self._ranks[rank] = connection
        if len(self._ranks) == self._num_ranks:
            self._listener.close()
        if self._closed.is_set():
            connection.close()  # it came meanwhile
        with suppress(ConnectionLost):  # of the driver: `_carry_down` sees to it
            self._up.send({"rank": rank, "here": True})
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
            with suppress(ConnectionLost):  # `_carry_up` tells the driver
                connection.send_bytes(call, [parts[rank]] if rank in parts else [])
