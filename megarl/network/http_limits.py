"""What our HTTP servers allow a caller: so much time for headers and for a body, and so many bytes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

HEADERS_S = 60.0  # to send a request's headers, counted from the connection or the reply before; idle ones end then too
BODY_S = 60.0  # to send a body


def limited_runner(app: web.Application) -> web.AppRunner:
    """Serves the application; to be set up within the event loop.

    Bodies are taken as they are sent: a compressed one may be a thousand times as large.
    """
    return web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        keepalive_timeout=HEADERS_S,
        lingering_time=1.0,
        auto_decompress=False,
    )


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


def parse_json(raw: bytes) -> Any:
    """Raises ValueError for what is no JSON, is nested too deeply, or has half a surrogate pair, which is no text."""
    try:
        body = json.loads(raw.decode())  # of bytes it would guess other encodings, and take halves of characters
        if b"\\ud" in raw.lower():
            json.dumps(body, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return body
