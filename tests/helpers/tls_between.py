"""Both ends of a connection, and somebody between them who sees and decides on each byte after the handshake."""

from __future__ import annotations

import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megarl.processes.channels.connection import Connection

TOKEN = "a token of these tests"


@dataclass
class Between:
    caller: Connection
    host: Connection
    from_caller: socket.socket  # what the caller sends; what is sent there comes to the caller
    from_host: socket.socket

    def record(self, header: dict[str, object]) -> bytes:
        """What the caller sends for this message."""
        self.caller.send(header)
        return self.from_caller.recv(2**16)

    def close(self) -> None:
        for end in (self.caller, self.host, self.from_caller, self.from_host):
            end.close()


def end_of(sock: socket.socket, *, calls: bool, token: str = TOKEN) -> Connection:
    sock.settimeout(60)
    return Connection(sock, token, calls=calls, deadline=time.monotonic() + 60)


def pair() -> tuple[Connection, Connection]:
    """The caller's end and the host's."""
    one, other = socket.socketpair()
    with ThreadPoolExecutor(1) as threads:
        host = threads.submit(end_of, other, calls=False)
        return end_of(one, calls=True), host.result()


def between() -> Between:
    (one, from_caller), (from_host, other) = socket.socketpair(), socket.socketpair()
    with ThreadPoolExecutor(2) as threads:
        caller, host = threads.submit(end_of, one, calls=True), threads.submit(end_of, other, calls=False)
        ways = {from_caller: from_host, from_host: from_caller}
        while True:
            ready, _, _ = select.select(list(ways), [], [], 0.01)
            for source in ready:
                ways[source].sendall(source.recv(2**16))
            if not ready and caller.done() and host.done():
                return Between(caller.result(), host.result(), from_caller, from_host)
