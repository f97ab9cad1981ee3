"""The greeting of a connection: both ends prove that they know the token (HMAC over two random challenges).

The token itself is never sent, and a peer without it is refused.  The keys of the connection are derived from the token
and both challenges; what the caller says of itself is the first sealed message.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from contextlib import suppress
from typing import Any

from megarl.processes.connection import Connection, WireRefused, read_exactly
from megarl.processes.seal import caller_keys

GREETING_S = 10.0  # time limit of the whole greeting, also for a slow peer
_SIZE = 4  # bytes before a word of the greeting
_LARGEST = 4096  # bytes of a word, so that an unauthenticated peer cannot use up memory


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
        _prepare(sock)
        deadline = time.monotonic() + timeout_s
        theirs, ours = str(_hear(sock, deadline).get("question", "")), secrets.token_hex(16)
        _say(sock, {"question": ours, "proof": _proof(token, "caller", theirs, ours)})
        if not _same(str(_hear(sock, deadline).get("proof", "")), _proof(token, "host", theirs, ours)):
            raise WireRefused(f"{address} has another token")
        connection = Connection(sock, caller_keys(token, f"{theirs} {ours}"))
        connection.send(hello)
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return connection


def greet(sock: socket.socket, token: str, limit_s: float = GREETING_S) -> tuple[Connection, dict[str, Any]] | None:
    """The connection and hello of a caller; None if the caller did not prove that it knows the token."""
    deadline = time.monotonic() + limit_s
    try:
        _prepare(sock)
        sock.settimeout(limit_s)
        ours = secrets.token_hex(16)
        _say(sock, {"question": ours})
        word = _hear(sock, deadline)
        theirs = str(word.get("question", ""))
        if not _same(str(word.get("proof", "")), _proof(token, "caller", ours, theirs)):
            _say(sock, {"proof": ""})
            raise WireRefused("a stranger")
        _say(sock, {"proof": _proof(token, "host", ours, theirs)})
        connection = Connection(sock, caller_keys(token, f"{ours} {theirs}").of_peer())
        hello, _ = connection.receive(deadline)
        sock.settimeout(None)
    except Exception:  # an unauthenticated peer can cause any error here
        with suppress(OSError):  # the peer may have closed it
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        return None
    return connection, hello


def _prepare(sock: socket.socket) -> None:
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _say(sock: socket.socket, word: dict[str, str]) -> None:
    data = json.dumps(word).encode()
    sock.sendall(len(data).to_bytes(_SIZE) + data)


def _hear(sock: socket.socket, deadline: float) -> dict[str, Any]:
    """A word of a peer that nobody knows yet: small, and complete before `deadline` (time.monotonic)."""
    size = int.from_bytes(read_exactly(sock, _SIZE, deadline))
    if size > _LARGEST:
        raise WireRefused(f"a greeting of {size} bytes; expected at most {_LARGEST}")
    try:
        word = json.loads(read_exactly(sock, size, deadline))
    except (ValueError, RecursionError) as error:
        raise WireRefused("a greeting that is no JSON") from error
    if not isinstance(word, dict):
        raise WireRefused("a greeting that is no object")
    return word


def _same(one: str, other: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())


def _proof(token: str, who: str, first: str, second: str) -> str:
    """HMAC that proves that `who` knows the token, valid for these two challenges only."""
    return hmac.new(token.encode(), f"{who} {first} {second}".encode(errors="replace"), hashlib.sha256).hexdigest()
