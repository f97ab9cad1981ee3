"""The speed of TCP between two machines: `megarl doctor --listen` on one, `megarl doctor --peer` on the other.

Both sides prove, with the run's token, who they are before a byte is measured; the token itself is never sent.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import statistics
import struct
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple
from urllib.parse import urlsplit

from megarl.doctor.finding import FAIL, NOTE, OK, Finding
from megarl.network.auth import derived
from megarl.network.sockets import listen

SLOW_LINK = 1.25e9  # bytes/s, 10 Gbit/s: weights of 7.6 B parameters in bfloat16 take twelve seconds there
STREAMS = 4  # connections at once: one alone does not fill a fast link
MEASURED_S = 1.0  # of each direction
PIECE_BYTES = 2**18
ROUNDS = 100  # round trips
TIMEOUT_S = 5.0  # of the proof
PATIENCE_S = 120.0  # of what is measured: a slow link drains its buffers for long
MOST_CONNECTIONS = 32
_PING, _TO_PEER, _FROM_PEER = b"P", b"U", b"D"
_NONCE_BYTES = _PROOF_BYTES = 32
_COUNT = struct.Struct("!Q")


class Place(NamedTuple):
    """An address and a port, as in 10.0.0.1:29400 or [fd00::1]:29400."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def place_of(text: str) -> Place:
    """A type of arguments."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # as sockets do with a name
    except ValueError:
        host = port = None
    if not host or port is None or parts.netloc != text or "@" in text:
        raise ArgumentTypeError(f"{text}: expected ADDRESS:PORT, such as 10.0.0.1:29400")
    return Place(host, port)


def serve(place: Place, token: str, say: Callable[[str], None]) -> None:
    """Answer peers with the same token until interrupted; port 0 takes a free one.  `say` gets a line for each event.

    Raises ValueError where it cannot listen there.
    """
    try:
        listener = listen(place.host, place.port)
    except OSError as error:
        raise ValueError(f"megarl doctor --listen {place}: {error.strerror or error}") from error
    key = _key(token)
    with listener:
        here = Place(place.host, listener.getsockname()[1])
        say(f"listening; on another machine, with the same token: megarl doctor --peer {here}   (Ctrl-C ends this)")
        free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        while True:
            free.acquire()  # strangers cannot take all files of this process
            connection, (host, *_) = listener.accept()
            threading.Thread(target=_answer, args=(connection, str(host), key, say, free), daemon=True).start()


def findings(peer: Place, token: str) -> list[Finding]:
    """Round trip and speed of both directions; one row that says why, if the peer cannot be reached."""
    key, subject = _key(token), f"network to {peer}"
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


def _key(token: str) -> bytes:
    return derived(token, "doctor's link").encode()


def _answer(
    connection: socket.socket, host: str, key: bytes, say: Callable[[str], None], free: threading.BoundedSemaphore
) -> None:
    """One connection of a peer, or of a stranger, which is told and closed; then one more is free."""
    with connection:
        try:
            kind = _welcome(connection, key)
            connection.settimeout(PATIENCE_S)
            if kind == _PING:
                say(f"measured from {host}")
                while message := connection.recv(1):
                    connection.sendall(message)
            elif kind == _TO_PEER:
                connection.sendall(_COUNT.pack(_drain(connection)))
            else:
                _fill(connection, time.perf_counter() + MEASURED_S)
        except PermissionError:
            say(f"refused {host}: it does not have the same token")
        except OSError as error:
            say(f"lost {host}: {error}")
    free.release()


def _welcome(connection: socket.socket, key: bytes) -> bytes:
    """The listener's side of the proof; what the peer wants.  Raises PermissionError for another token."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(mine)
    theirs, proof = _exactly(connection, _NONCE_BYTES), _exactly(connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"peer", mine + theirs)):
        raise PermissionError
    connection.sendall(_proof(key, b"listener", mine + theirs))
    return _exactly(connection, 1)


def _connect(peer: Place, key: bytes, kind: bytes) -> socket.socket:
    """The peer's side.  Raises OSError, with a sentence, where there is none or it has another token."""
    connection = socket.create_connection(peer, timeout=TIMEOUT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs, mine = _exactly(connection, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(mine + _proof(key, b"peer", theirs + mine))
        try:
            proof = _exactly(connection, _PROOF_BYTES)
        except ConnectionError:
            proof = b""
        if not hmac.compare_digest(proof, _proof(key, b"listener", theirs + mine)):
            raise OSError("what listens there does not have the same token")
        connection.sendall(kind)
        connection.settimeout(PATIENCE_S)
    except BaseException:
        connection.close()
        raise
    return connection


def _proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, side + nonces, "sha256").digest()


def _round_trip(peer: Place, key: bytes) -> float:
    """Seconds, median."""
    seconds = []
    with _connect(peer, key, _PING) as connection:
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            connection.sendall(b".")
            _exactly(connection, 1)
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _speed(peer: Place, key: bytes, kind: bytes) -> float:
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
    (count,) = _COUNT.unpack(_exactly(connection, _COUNT.size, PATIENCE_S))
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


def _exactly(connection: socket.socket, count: int, limit_s: float = TIMEOUT_S) -> bytes:
    """Raises ConnectionError where the other side ends before, TimeoutError after `limit_s` in all."""
    told, until = b"", time.monotonic() + limit_s
    while len(told) < count:
        connection.settimeout(max(0.001, until - time.monotonic()))
        part = connection.recv(count - len(told))
        if not part:
            raise ConnectionError("the other side closed the connection")
        told += part
    return told
