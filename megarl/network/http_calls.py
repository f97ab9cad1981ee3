"""What we allow a server that we call: so much time for the whole of a call, and so many bytes of reply.

The timeouts of HTTP libraries count for each read, and their replies may have any size: a server that sends a byte now
and then would hold its caller for ever, and one that never stops sending would fill its memory.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import httpcore

if TYPE_CHECKING:
    import aiohttp

PLAIN = {"Accept-Encoding": "identity"}  # a compressed reply may be a thousand times as large as what is counted
_SENT_PER_S = 1e7  # bytes of a body: so slow may a network be


class CallFailed(Exception):
    """A call has no whole reply; one sentence says why."""


class TooLarge(ValueError):
    """A reply has more bytes than its caller takes."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"a reply of more than {most_bytes:,} bytes")


class Answer(NamedTuple):
    """Example: Answer(503, "Service Unavailable", b"later")."""

    status: int
    reason: str
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


class Caller:
    """Example: Caller(auth_headers(token), context).call("GET", url, within_s=10, most_bytes=1 << 20).content

    Keeps connections, follows no redirects, and uses no proxy of the environment, which would see the token.  Threads
    may share it.  `context`: what it trusts of https; None: the public certificates.  `keep_alive_s`: for which an idle
    connection is kept.
    """

    def __init__(
        self, headers: Mapping[str, str], context: ssl.SSLContext | None = None, *, keep_alive_s: float = 5.0
    ) -> None:
        self._headers = {**PLAIN, **headers}
        self._pool = httpcore.ConnectionPool(
            context, max_connections=None, keepalive_expiry=keep_alive_s, network_backend=_TimedNetwork()
        )

    def call(self, method: str, url: str, body: object = None, *, within_s: float, most_bytes: int) -> Answer:
        """The whole reply, of whatever status.  `body`: sent as JSON; 10 MB of it have a second more.

        Raises CallFailed if no server can be reached, if it has not replied within `within_s`, with more than
        `most_bytes`, or with something else than HTTP.
        """
        content = b"" if body is None else json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        headers = {**self._headers, "Host": urlsplit(url).netloc}
        headers |= {"Content-Type": "application/json"} if content else {}
        within_s += len(content) / _SENT_PER_S
        ends = _ENDS.set(time.monotonic() + within_s)
        waits = {"timeout": {"connect": within_s, "pool": within_s}}
        try:
            with self._pool.stream(
                method, url, headers=list(headers.items()), content=content, extensions=waits
            ) as reply:
                reason = bytes(reply.extensions.get("reason_phrase", b"")).decode(errors="replace")
                return Answer(reply.status, reason, _whole(reply.iter_stream(), most_bytes))
        except httpcore.TimeoutException as error:
            raise CallFailed(f"no whole reply within {within_s:.3g} s") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol) as error:
            raise CallFailed(f"{type(error).__name__} {error}".strip()) from error
        except TooLarge as error:
            raise CallFailed(str(error)) from error
        finally:
            _ENDS.reset(ends)

    def close(self) -> None:
        self._pool.close()


def _whole(parts: Iterable[bytes], most_bytes: int) -> bytes:
    body = bytearray()
    for part in parts:
        body += part
        if len(body) > most_bytes:
            raise TooLarge(most_bytes)
    return bytes(body)


async def read_at_most(reply: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """The body of a reply to a session that decompresses nothing.  Raises TooLarge; the caller limits the time."""
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > most_bytes:
            raise TooLarge(most_bytes)
    return bytes(body)


# time.monotonic() at which the call of this thread ends.
_ENDS: ContextVar[float] = ContextVar("ends")


def _left_s() -> float:
    """What is left of the call's time.  Raises httpcore.ReadTimeout if nothing is."""
    if (left := _ENDS.get() - time.monotonic()) <= 0:
        raise httpcore.ReadTimeout
    return left


class _TimedNetwork(httpcore.SyncBackend):
    """Connections of which each operation ends with the call for which it is made."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        return _Timed(super().connect_tcp(host, port, _left_s(), local_address, socket_options))


class _Timed(httpcore.NetworkStream):
    _PART = 1 << 16  # bytes to send at a time: each time the network may take up to all that is left

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left_s())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for at in range(0, len(buffer), self._PART):
            self._stream.write(buffer[at : at + self._PART], _left_s())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Timed(self._stream.start_tls(ssl_context, server_hostname, _left_s()))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
