"""Connections between the processes of a run: TLS in which both sides prove that they know a token, and messages.

A message is a JSON header and, if there are tensors, a safetensors payload.  Pickles are never sent.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import safetensors.torch
from torch import Tensor

from megarl.io.callers import PROOF_S
from megarl.io.tls import PEER, PLAIN, peer_context

_SIZES = struct.Struct(">IQ")  # bytes of the header, bytes of the payload
_MAX_HEADER, _MAX_BODY = 64 * 2**20, 2**40  # bytes
_PART, _RECORD = 2**18, 2**14  # bytes that are encrypted, and decrypted, at once: buffers that fit a processor's cache

Bytes = bytes | bytearray | memoryview
Tensors = dict[str, Tensor]


class ConnectionLost(ConnectionError):
    """The peer is gone, or somebody in between changed what it sent."""


class WireRefused(ConnectionLost):
    """The two sides have different tokens, or the other one is no process of ours."""


class Connection:
    """One connection; `send` may be called from several threads, `receive` from one.

    OpenSSL allows one thread at a time.  So it works on buffers, under a lock that no thread holds while it waits.
    """

    def __init__(self, sock: socket.socket, token: str, *, calls: bool, deadline: float) -> None:
        """`calls`: this side has connected.  `deadline`: of the handshake (time.monotonic).  Raises ConnectionLost."""
        self.sock = sock
        self._sending, self._lock = threading.Lock(), threading.Lock()  # of the order of messages; of the buffers
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = peer_context(token, calls=calls).wrap_bio(
            self._received, self._to_send, server_side=not calls, server_hostname=PEER if calls else None
        )
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._shake_hands(deadline)
        self._record = memoryview(b"")  # the rest of the record that was decrypted last
        self._is_plain = self._tls.selected_alpn_protocol() == PLAIN

    def _shake_hands(self, deadline: float) -> None:
        is_done = False
        while not is_done:
            try:
                self._tls.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                with suppress(OSError):
                    self.sock.sendall(self._to_send.read())  # why
                raise WireRefused(
                    "has another token"
                    if isinstance(error, ssl.SSLCertVerificationError)
                    else f"is no process of a run ({error.reason})"
                ) from error
            try:
                self.sock.sendall(self._to_send.read())
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not is_done:
                self._received.write(_some_bytes(self.sock, deadline))

    @property
    def has_more(self) -> bool:
        """Whether some of the next message is here already, so that nothing more of it may come on the socket."""
        return self._received.pending > 0 or len(self._record) > 0

    def send(self, header: dict[str, Any], tensors: Tensors | None = None) -> None:
        self.send_bytes(header, [to_bytes(tensors)])

    def send_bytes(self, header: dict[str, Any], parts: Sequence[Bytes]) -> None:
        """Send a message; its payload is the concatenation of the parts."""
        head = json.dumps(header).encode()
        size = sum(len(part) for part in parts)
        try:
            with self._sending:
                for part in (_SIZES.pack(len(head), size) + head, *parts):
                    view = memoryview(part)
                    for begin in range(0, len(view), _PART):
                        self.sock.sendall(self._encrypted(view[begin : begin + _PART]))
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def _encrypted(self, data: memoryview) -> Bytes:
        if self._is_plain:
            return data
        with self._lock:
            self._tls.write(data)
            return self._to_send.read()

    def receive(self, deadline: float | None = None) -> tuple[dict[str, Any], Tensors]:
        """Wait for the next message.  Raises ConnectionLost if the peer is gone.

        `deadline`: the whole message is there before it (time.monotonic); None: the socket's own timeout applies.
        """
        header, body = self.receive_bytes(deadline)
        return header, from_bytes(body)

    def receive_bytes(self, deadline: float | None = None) -> tuple[dict[str, Any], bytes]:
        """The same with the payload as raw bytes."""
        head_size, body_size = _SIZES.unpack(self._read(_SIZES.size, deadline))
        try:
            if head_size > _MAX_HEADER or body_size > _MAX_BODY:
                raise MemoryError
            return json.loads(self._read(head_size, deadline)), self._read(body_size, deadline)
        except MemoryError as error:
            self.close()
            raise ConnectionLost(f"it sends a message of {head_size + body_size} bytes, too many for memory") from error

    def _read(self, size: int, deadline: float | None) -> bytes:
        """So many bytes; what is only announced takes no memory."""
        parts: list[Bytes] = []
        while size:
            if not len(self._record):
                self._record = memoryview(self._decrypted())
            if len(self._record):
                parts.append(self._record[:size])
                self._record = self._record[size:]
                size -= len(parts[-1])
            else:
                self._received.write(_some_bytes(self.sock, deadline))
        return b"".join(parts)

    def _decrypted(self) -> bytes:
        """The next record, or a part of it; empty if no whole one has been received."""
        if self._is_plain:
            return self._received.read(_RECORD)
        try:
            with self._lock:
                return self._tls.read(_RECORD)
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError as error:
            self.close()
            raise ConnectionLost(f"a record is not the next one of the peer ({error.reason})") from error

    def close(self) -> None:
        """Close the connection; this also ends a wait for a message in another thread."""
        with suppress(OSError):  # the peer may have closed it
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def connect(
    address: str, token: str, hello: dict[str, Any], *, timeout_s: float, source: str | None = None
) -> Connection:
    """Connect to `host:port`, authenticate and send `hello`; `source`: the own address to connect from.

    Raises OSError if nothing listens there, WireRefused if the peer has another token.
    """
    host, port = address.rsplit(":", 1)
    own = None if source is None else (source, 0)
    sock = socket.create_connection((host, int(port)), timeout=timeout_s, source_address=own)
    try:
        connection = Connection(sock, token, calls=True, deadline=time.monotonic() + timeout_s)
        connection.send(hello)
    except WireRefused as error:
        sock.close()
        raise WireRefused(f"{address} {error}") from error
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return connection


def greet(sock: socket.socket, token: str, limit_s: float = PROOF_S) -> tuple[Connection, dict[str, Any]] | None:
    """The connection and hello of a caller; None if the caller did not prove that it knows the token."""
    deadline = time.monotonic() + limit_s
    try:
        sock.settimeout(limit_s)
        connection = Connection(sock, token, calls=False, deadline=deadline)
        hello, _ = connection.receive(deadline)
        sock.settimeout(None)
    except Exception:  # an unauthenticated peer can cause any error here
        with suppress(OSError):  # the peer may have closed it
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        return None
    return connection, hello


def _some_bytes(sock: socket.socket, deadline: float | None) -> bytes:
    """What comes next, before `deadline`.  Raises ConnectionLost."""
    try:
        if deadline is not None:
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
        data = sock.recv(_PART)
    except OSError as error:
        raise ConnectionLost(str(error)) from error
    if not data:
        raise ConnectionLost("the connection was closed")
    return data


def to_bytes(tensors: Tensors | None) -> bytes:
    return safetensors.torch.save({n: t.contiguous() for n, t in tensors.items()}) if tensors else b""


def from_bytes(body: bytes) -> Tensors:
    return safetensors.torch.load(body) if body else {}
