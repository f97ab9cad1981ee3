"""What we allow a server that we call: so much time for the whole of a call, and so many bytes of reply.

The timeouts of HTTP libraries count for each read, and their replies may have any size: a server that sends a byte now
and then would hold its caller without end, and one that never stops sending would fill its memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import aiohttp

PLAIN = {"Accept-Encoding": "identity"}  # a compressed reply may be a thousand times as large as what is counted
_SENT_PER_S = 1e7  # bytes of a body: so slow may a network be
_starting = threading.RLock()  # a collection of garbage in it may close a caller


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
        self._context = context
        self._keep_alive_s = keep_alive_s
        self._sessions: list[aiohttp.ClientSession] = []  # one, which the loop makes at the first call
        self._finalizer = weakref.finalize(self, _close, self._sessions)

    def call(self, method: str, url: str, body: object = None, *, within_s: float, most_bytes: int) -> Answer:
        """The whole reply, of whatever status.  `body`: sent as JSON; 10 MB of it have a second more.

        Raises CallFailed if no server can be reached, if it has not replied within `within_s`, with more than
        `most_bytes`, or with something else than HTTP.
        """
        content = None if body is None else json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        within_s += len(content or b"") / _SENT_PER_S
        reply = asyncio.run_coroutine_threadsafe(self._call(method, url, content, within_s, most_bytes), _loop())
        try:
            return reply.result()
        except TimeoutError as error:
            raise CallFailed(f"no whole reply within {within_s:.3g} s") from error
        except aiohttp.ClientConnectorError as error:
            is_known = error.errno is not None and error.errno > 0 and not isinstance(error.os_error, ssl.SSLError)
            reason = os.strerror(error.errno or 0) if is_known else str(error.os_error)
            raise CallFailed(f"no connection: {reason}") from error
        except (aiohttp.ClientError, TooLarge, OSError) as error:
            raise CallFailed(str(error) or type(error).__name__) from error
        finally:
            reply.cancel()

    async def _call(self, method: str, url: str, content: bytes | None, within_s: float, most_bytes: int) -> Answer:
        if not self._sessions:
            session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=self._keep_alive_s, ssl=self._context or True
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
            self._sessions.append(session)
        headers = {} if content is None else {"Content-Type": "application/json"}
        async with (
            asyncio.timeout(within_s),
            self._sessions[0].request(method, url, data=content, headers=headers, allow_redirects=False) as reply,
        ):
            return Answer(reply.status, reply.reason or "", await read_at_most(reply, most_bytes))

    def close(self) -> None:
        self._finalizer()


def _close(sessions: list[aiohttp.ClientSession]) -> None:
    for session in sessions:
        asyncio.run_coroutine_threadsafe(session.close(), _loop())


def _loop() -> asyncio.AbstractEventLoop:
    """The loop of all callers of this process, which a thread runs."""
    with _starting:
        return _loop_of(os.getpid())


@cache
def _loop_of(process: int) -> asyncio.AbstractEventLoop:  # noqa: ARG001  # a fork has no thread of its parent
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="http").start()
    return loop


async def read_at_most(reply: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """The body of a reply to a session that decompresses nothing.  Raises TooLarge; the caller limits the time."""
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > most_bytes:
            raise TooLarge(most_bytes)
    return bytes(body)
