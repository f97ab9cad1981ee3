"""Serves our HTTP, and limits callers: time for headers and a body, bytes, and connections of those without the key."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from json import scanner
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from megarl.io.callers import LOOK_S, Callers
from megarl.io.sockets import listen

HEADERS_S = 60.0  # for headers, counted from the reply before, of a caller that has shown the key
BODY_S = 60.0  # to send a body
_MANY_ITEMS = 100_000  # of a body; Python's decoder in C needs about 20 ms for them
_BACKLOG = 4096  # connections that nobody has accepted yet
_CALLERS, _HAS_KEY = web.AppKey("callers", Callers), web.RequestKey("has_key", bool)

logger = logging.getLogger(__name__)
logger.addFilter(lambda record: not isinstance((record.exc_info or [None] * 2)[1], HttpProcessingError))  # not HTTP


class _PatientDecoder(json.JSONDecoder):
    """The one in C lets no other thread do anything before it is at the end; this one does, and is slower."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]


@asynccontextmanager
async def served(
    app: web.Application, host: str, port: int = 0, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serves the application; yields the port.

    Those who have not shown the key are `Callers`.  The application calls `let_in` for a request with the key; the
    connection of another request is closed behind its reply.
    Bodies are taken as they are sent: a compressed one may be a thousand times as large.
    """
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    callers = app[_CALLERS] = Callers(f"http at {host}:{port}", most=min(_BACKLOG, most_files // 2))
    app.on_response_prepare.append(_send_strangers_away)
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=logger,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        keepalive_timeout=HEADERS_S,
        lingering_time=1.0,
        auto_decompress=False,
    )
    await runner.setup()
    loop = asyncio.get_running_loop()

    def accept() -> None:
        """One caller in each turn of the loop, so that those turned away close their files; asyncio has no limit."""
        try:
            caller = callers.accept(listener)
        except OSError:
            loop.remove_reader(listener)  # until the next look
        else:
            if caller is not None:
                loop.create_task(connect(caller[0]))  # noqa: RUF006  # the loop holds its socket, and that its task

    async def connect(sock: socket.socket) -> None:
        assert runner.server is not None, "it is set up"
        with suppress(OSError):  # the caller has gone, or does not speak TLS
            await loop.connect_accepted_socket(runner.server, sock, ssl=tls)

    async def look() -> None:
        while True:
            loop.add_reader(listener, accept)
            await asyncio.sleep(LOOK_S)
            callers.look()

    with listen(host, port, backlog=_BACKLOG) as listener:
        listener.setblocking(False)
        looking = loop.create_task(look())
        try:
            yield listener.getsockname()[1]
        finally:
            looking.cancel()
            loop.remove_reader(listener)
            listener.close()  # who comes now is refused, and does not wait
            await runner.cleanup()


def let_in(request: web.Request) -> None:
    """The caller has shown the key."""
    request[_HAS_KEY] = True
    request.app[_CALLERS].let_in(request.get_extra_info("peername"))


async def _send_strangers_away(request: web.Request, response: web.StreamResponse) -> None:
    if _HAS_KEY not in request:
        response.force_close()
        response.headers["Connection"] = "close"


async def body_of(request: web.Request) -> bytes:
    """The whole body.  Raises HTTPRequestEntityTooLarge before it is read, HTTPRequestTimeout after BODY_S."""
    largest = request.client_max_size
    if request.content_length is not None and request.content_length > largest:
        raise web.HTTPRequestEntityTooLarge(max_size=largest, actual_size=request.content_length)
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout() from error
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(reason="the body does not end as it was announced") from error


async def json_object(request: web.Request) -> dict[str, Any]:
    """The body, an object.  Raises what `body_of` does, and ValueError."""
    return json_of(await body_of(request))


def json_of(raw: bytes) -> dict[str, Any]:
    """The object that a body holds; one without a byte counts as empty.  Raises ValueError.

    No JSON is also what is nested too deeply, or has half a surrogate pair, which is no text.
    """
    try:
        decoder = _PatientDecoder if raw.count(b",") > _MANY_ITEMS else json.JSONDecoder
        body = json.loads(raw.decode() or "{}", cls=decoder)  # of bytes it would guess other encodings, take halves
        if b"\\ud" in raw.lower():
            for piece in json.JSONEncoder(ensure_ascii=False).iterencode(body):
                piece.encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError("the body is no JSON object")
    return body
