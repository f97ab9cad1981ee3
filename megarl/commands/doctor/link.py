"""The speed of TCP between two machines: `megarl doctor --listen` on one, `megarl doctor --peer` on the other.

Both sides prove, with the run's token, who they are before a byte is measured; the token itself is never sent.
"""

from __future__ import annotations

import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from megarl.commands.doctor.machine import FAIL, NOTE, OK, Finding
from megarl.io.auth import derived
from megarl.io.sockets import listen
from megarl.plugins.options import Place
from megarl.processes.channels.connection import Connection, WireRefused, connect
from megarl.processes.channels.listener import Listener

SLOW_LINK = 1.25e9  # bytes/s, 10 Gbit/s: weights of 7.6 B parameters in bfloat16 take twelve seconds there
STREAMS = 4  # connections at once: one alone does not fill a fast link
MEASURED_S = 1.0  # of each direction
PIECE_BYTES = 2**18
ROUNDS = 100  # round trips
TIMEOUT_S = 5.0  # of a connection and of the proof
PATIENCE_S = 120.0  # of what is measured: a slow link drains its buffers for long
_PING, _TO_PEER, _FROM_PEER = "ping", "to peer", "from peer"
_PURPOSE = "doctor's link"
_COUNT = struct.Struct("!Q")


def serve(place: Place, token: str, say: Callable[[str], None]) -> None:
    """Answer peers with the same token until interrupted; port 0 takes a free one.  `say` gets a line for each event.

    Raises ValueError where it cannot listen there.
    """
    try:
        listener = listen(place.host, place.port)
    except OSError as error:
        raise ValueError(f"megarl doctor --listen {place}: {error.strerror or error}") from error
    here = Place(place.host, listener.getsockname()[1])
    say(f"listening; on another machine, with the same token: megarl doctor --peer {here}   (Ctrl-C ends this)")
    answer = Listener(listener, derived(token, _PURPOSE), partial(_measure, say), "link", TIMEOUT_S)
    with closing(answer):
        threading.Event().wait()


def findings(peer: Place, token: str) -> list[Finding]:
    """Round trip and speed of both directions; one row that says why, if the peer cannot be reached."""
    key, subject = derived(token, _PURPOSE), f"network to {peer}"
    try:
        round_trip_s = _round_trip(peer, key)
        to_peer = _speed(peer, key, _TO_PEER)
        from_peer = _speed(peer, key, _FROM_PEER)
    except OSError as error:
        mend = f"megarl doctor --listen {peer}  # there, with the same token"
        return [Finding(subject, error.strerror or str(error), "the peer answers", FAIL, mend)]
    wanted = f"{SLOW_LINK / 1e9:g} GB/s, for weights and batches (TCP; NCCL over InfiniBand is faster)"
    return [
        Finding(f"{subject}, round trip", f"{1e6 * round_trip_s:.0f} us", "optional", OK, value=round_trip_s),
        *(
            Finding(
                f"{subject}, {name}", f"{speed / 1e9:.2f} GB/s", wanted, OK if speed >= SLOW_LINK else NOTE, "", speed
            )
            for name, speed in (("sent", to_peer), ("received", from_peer))
        ),
    ]


def _measure(say: Callable[[str], None], connection: Connection, hello: Mapping[str, Any]) -> None:
    """What a peer wants, over the socket as it is: encryption would cost the speed that is measured."""
    sock, kind = connection.sock, hello["kind"]
    host = sock.getpeername()[0]
    sock.settimeout(PATIENCE_S)
    try:
        connection.send({})
        sock.recv(1)  # the peer has read that: all that follows is measured
        if kind == _PING:
            say(f"measured from {host}")
            while message := sock.recv(1):
                sock.sendall(message)
        elif kind == _TO_PEER:
            sock.sendall(_COUNT.pack(_drain(sock)))
        else:
            _fill(sock, time.perf_counter() + MEASURED_S)
    except OSError as error:
        say(f"lost {host}: {error}")
    connection.close()


def _connect(peer: Place, key: str, kind: str) -> socket.socket:
    """The peer's side.  Raises OSError, with a sentence, where there is none or it has another token."""
    try:
        connection = connect(f"{peer.host}:{peer.port}", key, {"kind": kind}, timeout_s=TIMEOUT_S)
    except WireRefused as error:
        raise OSError("what listens there does not have the same token") from error
    connection.receive(time.monotonic() + TIMEOUT_S)
    connection.sock.settimeout(PATIENCE_S)
    connection.sock.sendall(b".")
    return connection.sock


def _round_trip(peer: Place, key: str) -> float:
    """Seconds, median."""
    seconds = []
    with _connect(peer, key, _PING) as connection:
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            connection.sendall(b".")
            connection.recv(1)
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _speed(peer: Place, key: str, kind: str) -> float:
    """Bytes per second over all streams."""
    with ExitStack() as stack, ThreadPoolExecutor(STREAMS) as pool:
        connections = [stack.enter_context(_connect(peer, key, kind)) for _ in range(STREAMS)]
        begun = time.perf_counter()
        count = sum(pool.map(_upload if kind == _TO_PEER else _drain, connections))
        return count / (time.perf_counter() - begun)


def _upload(connection: socket.socket) -> int:
    """Bytes that arrived, as the other side counted them."""
    _fill(connection, time.perf_counter() + MEASURED_S)
    connection.shutdown(socket.SHUT_WR)
    (count,) = _COUNT.unpack(b"".join(iter(partial(connection.recv, _COUNT.size), b"")))
    return int(count)


def _fill(connection: socket.socket, until: float) -> None:
    piece = bytes(PIECE_BYTES)
    while time.perf_counter() < until:
        connection.sendall(piece)


def _drain(connection: socket.socket) -> int:
    """Bytes until the other side has no more."""
    count, piece = 0, bytearray(PIECE_BYTES)
    while received := connection.recv_into(piece):
        count += received
    return count
