"""Messages between the driver and its ranks: a JSON header and, when there are tensors, one safetensors blob.

No pickle crosses a socket.  The first message of a connection carries the run's token; without it the door is shut.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import threading
from typing import Any

import safetensors.torch
from torch import Tensor

_HEAD = struct.Struct(">IQ")  # bytes of the header, bytes of the payload
_MAX_HEADER = 64 * 2**20

Tensors = dict[str, Tensor]


class WireClosed(ConnectionError):
    """The other side is gone."""


class Wire:
    """One connection; `send` may be called from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._lock = threading.Lock()

    def send(self, header: dict[str, Any], tensors: Tensors | None = None) -> None:
        head = json.dumps(header).encode()
        body = safetensors.torch.save({n: t.contiguous() for n, t in tensors.items()}) if tensors else b""
        try:
            with self._lock:
                self.sock.sendall(_HEAD.pack(len(head), len(body)) + head)
                if body:
                    self.sock.sendall(body)
        except OSError as error:
            raise WireClosed(str(error)) from error

    def receive(self, *, max_bytes: int | None = None) -> tuple[dict[str, Any], Tensors]:
        """The next message; waits for it.  Raises WireClosed when the other side has gone."""
        head_size, body_size = _HEAD.unpack(self._read(_HEAD.size))
        assert head_size <= _MAX_HEADER, f"a header of {head_size} bytes is not one of ours"
        assert max_bytes is None or head_size + body_size <= max_bytes, f"want at most {max_bytes} bytes"
        header = json.loads(self._read(head_size))
        return header, safetensors.torch.load(bytes(self._read(body_size))) if body_size else {}

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, have = memoryview(data), 0
        while have < size:
            try:
                count = self.sock.recv_into(view[have:])
            except OSError as error:
                raise WireClosed(str(error)) from error
            if not count:
                raise WireClosed("the connection was closed")
            have += count
        return data

    def close(self) -> None:
        self.sock.close()


def connect(address: str, token: str, hello: dict[str, Any], *, timeout_s: float) -> Wire:
    """Open a connection to `host:port` and introduce oneself."""
    host, port = address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), timeout=timeout_s)
    sock.settimeout(None)
    wire = Wire(sock)
    wire.send({"token": token, **hello})
    return wire


def accept(listener: socket.socket, token: str) -> tuple[Wire, dict[str, Any]] | None:
    """The next connection and its hello; None when it did not know the token."""
    sock, _ = listener.accept()
    sock.settimeout(10.0)  # a stranger who says nothing does not hold the door
    wire = Wire(sock)
    try:
        hello, _ = wire.receive(max_bytes=4096)  # a stranger's word costs no memory
    except (WireClosed, AssertionError, ValueError):
        wire.close()
        return None
    if not hmac.compare_digest(str(hello.pop("token", "")), token):
        wire.close()
        return None
    sock.settimeout(None)
    return wire, hello
