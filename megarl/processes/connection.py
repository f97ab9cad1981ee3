"""Messages between the processes of a run: a JSON header and, if there are tensors, a safetensors payload.

Pickles are never sent.  A connection starts with a mutual challenge-response (HMAC with the token); the token itself is
never sent, and a peer without it is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import safetensors.torch
from torch import Tensor

HEARTBEAT_S = 2.0  # interval of heartbeats of a process for which others wait
_HEAD = struct.Struct(">IQ")  # bytes of the header, bytes of the payload
_MAX_HEADER = 64 * 2**20
_MAX_GREETING = 4096  # bytes, so that an unauthenticated peer cannot use up memory
_GREETING_S = 10.0  # time limit of the whole greeting, also for a slow peer
_MAX_CALLERS = 256  # concurrent greetings; further callers are refused
_LOOK_S = 0.2

Tensors = dict[str, Tensor]
Bytes = bytes | bytearray | memoryview


class ConnectionLost(ConnectionError):
    """The peer is gone."""


class WireRefused(ConnectionLost):
    """The two sides have different tokens."""


class Connection:
    """One connection; `send` may be called from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock = sock
        self._lock = threading.Lock()

    def send(self, header: dict[str, Any], tensors: Tensors | None = None) -> None:
        self.send_bytes(header, [to_bytes(tensors)])

    def send_bytes(self, header: dict[str, Any], parts: Sequence[Bytes]) -> None:
        """Send a message; its payload is the concatenation of the parts."""
        head = json.dumps(header).encode()
        size = sum(len(part) for part in parts)
        try:
            with self._lock:
                self.sock.sendall(_HEAD.pack(len(head), size) + head)
                for part in parts:
                    self.sock.sendall(part)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self) -> tuple[dict[str, Any], Tensors]:
        """Wait for the next message.  Raises ConnectionLost if the peer is gone."""
        header, body = self.receive_bytes()
        return header, from_bytes(body)

    def receive_bytes(self) -> tuple[dict[str, Any], bytearray]:
        """The same with the payload as raw bytes."""
        head_size, body_size = _HEAD.unpack(self._read(_HEAD.size))
        assert head_size <= _MAX_HEADER, f"a header of {head_size} bytes is not one of ours"
        return json.loads(self._read(head_size)), self._read(body_size)

    def receive_greeting(self, deadline: float) -> dict[str, Any]:
        """A message of an unauthenticated peer: small, complete before `deadline` (time.monotonic), no payload."""
        head_size, body_size = _HEAD.unpack(self._read(_HEAD.size, deadline))
        if head_size > _MAX_GREETING or body_size:
            raise WireRefused(f"a greeting of {head_size} + {body_size} bytes; expected {_MAX_GREETING} and none")
        word = json.loads(self._read(head_size, deadline))
        if not isinstance(word, dict):
            raise WireRefused("a greeting that is no object")
        return word

    def _read(self, size: int, deadline: float | None = None) -> bytearray:
        data = bytearray(size)
        view, have = memoryview(data), 0
        while have < size:
            try:
                if deadline is not None:
                    self.sock.settimeout(max(1e-3, deadline - time.monotonic()))
                count = self.sock.recv_into(view[have:])
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not count:
                raise ConnectionLost("the connection was closed")
            have += count
        return data

    def close(self) -> None:
        """Close the connection; this also ends a wait for a message in another thread."""
        with suppress(OSError):  # the peer may have closed it
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def to_bytes(tensors: Tensors | None) -> bytes:
    return safetensors.torch.save({n: t.contiguous() for n, t in tensors.items()}) if tensors else b""


def from_bytes(body: Bytes) -> Tensors:
    return safetensors.torch.load(bytes(body)) if len(body) else {}


def connect(
    address: str, token: str, hello: dict[str, Any], *, timeout_s: float, source: str | None = None
) -> Connection:
    """Connect to `host:port`, authenticate and send `hello`; `source`: the own address to connect from.

    Raises OSError if nothing listens there, WireRefused if the peer has another token.
    """
    host, port = address.rsplit(":", 1)
    own = None if source is None else (source, 0)
    sock = socket.create_connection((host, int(port)), timeout=timeout_s, source_address=own)
    connection, deadline = Connection(sock), time.monotonic() + timeout_s
    try:
        theirs = str(connection.receive_greeting(deadline).get("question", ""))
        ours = secrets.token_hex(16)
        connection.send({"question": ours, "proof": _proof(token, "caller", theirs, ours), **hello})
        answer = connection.receive_greeting(deadline)
        if not _same(str(answer.get("proof", "")), _proof(token, "host", theirs, ours)):
            raise WireRefused(f"{address} has another token")
    except BaseException:
        connection.close()
        raise
    sock.settimeout(None)
    return connection


def greet(sock: socket.socket, token: str, limit_s: float = _GREETING_S) -> tuple[Connection, dict[str, Any]] | None:
    """The connection and hello of a caller; None if the caller did not prove that it knows the token."""
    connection, deadline = Connection(sock), time.monotonic() + limit_s
    try:
        sock.settimeout(limit_s)
        ours = secrets.token_hex(16)
        connection.send({"question": ours})
        hello = connection.receive_greeting(deadline)
        theirs = str(hello.pop("question", ""))
        if not _same(str(hello.pop("proof", "")), _proof(token, "caller", ours, theirs)):
            connection.send({"proof": ""})
            raise WireRefused("a stranger")
        connection.send({"proof": _proof(token, "host", ours, theirs)})
        sock.settimeout(None)
    except Exception:  # an unauthenticated peer can cause any error here
        connection.close()
        return None
    return connection, hello


class Listener:
    """Accepts callers that know the token.  Each is greeted in its own thread, so that no caller blocks another.

    `let_in(connection, hello)` is called in that thread.  The Listener owns the socket `listener` and closes it.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        let_in: Callable[[Connection, dict[str, Any]], None],
        name: str = "door",
    ) -> None:
        self._listener, self._token, self._let_in = listener, token, let_in
        self._room = threading.BoundedSemaphore(_MAX_CALLERS)
        self._closed = threading.Event()
        listener.settimeout(_LOOK_S)
        self._thread = threading.Thread(target=self._open, daemon=True, name=name)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting callers."""
        self._closed.set()
        with suppress(OSError):  # it is closed already
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()

    def _open(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                try:
                    sock, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # closed, or temporarily out of file descriptors
                    self._closed.wait(_LOOK_S)
                    continue
                if self._room.acquire(blocking=False):
                    threading.Thread(target=self._greet, args=(sock,), daemon=True).start()
                else:
                    sock.close()

    def _greet(self, sock: socket.socket) -> None:
        try:
            arrival = greet(sock, self._token)
        finally:
            self._room.release()
        if arrival is not None and self._closed.is_set():
            arrival[0].close()
        elif arrival is not None:
            self._let_in(*arrival)


def _same(one: str, other: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())


def _proof(token: str, who: str, first: str, second: str) -> str:
    """HMAC that proves that `who` knows the token, valid for these two challenges only."""
    return hmac.new(token.encode(), f"{who} {first} {second}".encode(errors="replace"), hashlib.sha256).hexdigest()
