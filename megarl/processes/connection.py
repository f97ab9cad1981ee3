"""Messages between the processes of a run: a JSON header and, if there are tensors, a safetensors payload.

Pickles are never sent.  All that crosses is sealed (`seal`) with keys that both ends agree on in a greeting
(`greeting`).
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import safetensors.torch
from torch import Tensor

from megarl.processes.seal import HEAD, LARGEST, Bytes, Keys, Opener, Sealer

HEARTBEAT_S = 2.0  # interval of heartbeats of a process for which others wait
_SIZES = struct.Struct(">IQ")  # bytes of the header, bytes of the payload
_MAX_HEADER = 64 * 2**20

Tensors = dict[str, Tensor]


class ConnectionLost(ConnectionError):
    """The peer is gone, or somebody in between changed what it sent."""


class WireRefused(ConnectionLost):
    """The two sides have different tokens."""


class Connection:
    """One connection; `send` may be called from several threads, `receive` from one.

    A record never holds parts of two messages, so nothing is left over after one: `select` on the socket is enough.
    """

    def __init__(self, sock: socket.socket, keys: Keys) -> None:
        self.sock = sock
        self._lock = threading.Lock()
        self._sealer, self._opener = Sealer(keys.send), Opener(keys.receive)
        self._opened = memoryview(b"")  # the rest of the record that was opened last

    def send(self, header: dict[str, Any], tensors: Tensors | None = None) -> None:
        self.send_bytes(header, [to_bytes(tensors)])

    def send_bytes(self, header: dict[str, Any], parts: Sequence[Bytes]) -> None:
        """Send a message; its payload is the concatenation of the parts."""
        head = json.dumps(header).encode()
        size = sum(len(part) for part in parts)
        try:
            with self._lock:
                for part in (_SIZES.pack(len(head), size) + head, *parts):
                    view = memoryview(part)
                    for begin in range(0, len(view), LARGEST):
                        self.sock.sendall(self._sealer.seal(view[begin : begin + LARGEST]))
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self, deadline: float | None = None) -> tuple[dict[str, Any], Tensors]:
        """Wait for the next message.  Raises ConnectionLost if the peer is gone.

        `deadline`: the whole message is there before it (time.monotonic); None: the socket's own timeout applies.
        """
        header, body = self.receive_bytes(deadline)
        return header, from_bytes(body)

    def receive_bytes(self, deadline: float | None = None) -> tuple[dict[str, Any], bytearray]:
        """The same with the payload as raw bytes."""
        head_size, body_size = _SIZES.unpack(self._read(_SIZES.size, deadline))
        assert head_size <= _MAX_HEADER, f"a header of {head_size} bytes is not one of ours"
        return json.loads(self._read(head_size, deadline)), self._read(body_size, deadline)

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data, have = bytearray(size), 0
        while have < size:
            if not len(self._opened):
                self._opened = memoryview(self._next_record(deadline))
            part, self._opened = self._opened[: size - have], self._opened[size - have :]
            data[have : have + len(part)] = part
            have += len(part)
        return data

    def _next_record(self, deadline: float | None) -> bytes:
        try:
            head = read_exactly(self.sock, HEAD, deadline)
            return self._opener.open(head, read_exactly(self.sock, self._opener.size(head), deadline))
        except ValueError as error:
            self.close()
            raise ConnectionLost(str(error)) from error

    def close(self) -> None:
        """Close the connection; this also ends a wait for a message in another thread."""
        with suppress(OSError):  # the peer may have closed it
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def read_exactly(sock: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """So many bytes, all of them before `deadline` (time.monotonic).  Raises ConnectionLost."""
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        try:
            if deadline is not None:
                sock.settimeout(max(1e-3, deadline - time.monotonic()))
            count = sock.recv_into(view[have:])
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not count:
            raise ConnectionLost("the connection was closed")
        have += count
    return data


def to_bytes(tensors: Tensors | None) -> bytes:
    return safetensors.torch.save({n: t.contiguous() for n, t in tensors.items()}) if tensors else b""


def from_bytes(body: Bytes) -> Tensors:
    return safetensors.torch.load(bytes(body)) if len(body) else {}
