"""A service that rewards are asked from: JSON over HTTP, under a limit."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import aiohttp

from megarl.io.http_calls import PLAIN, TooLarge, read_at_most
from megarl.rewards.services.limit import Limit, ServiceError, is_busy, nobody_listens, seconds_of

T = TypeVar("T")

SHOWN = 200  # characters of an error's reply
REPLY_BYTES = 4 << 20  # what a reply may have, unless its caller says otherwise


class Service:
    """Example:

        service = Service("http://judge:8000/v1", Limit(64))
        text = await service.post("/completions", body, lambda reply: reply["choices"][0]["text"])

    `api_key`: sent as a bearer token.  Its connections are closed when the event loop ends.
    """

    def __init__(self, url: str, limit: Limit, *, api_key: str = "") -> None:
        self._url, self._limit = url.rstrip("/"), limit
        self._headers = {**PLAIN, **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
        self._http: aiohttp.ClientSession | None = None
        self._closes: asyncio.Task[None] | None = None

    async def post(
        self, route: str, body: Mapping[str, Any], read: Callable[[Any], T], *, most_bytes: int = REPLY_BYTES
    ) -> T:
        """What `read` finds in the reply, of at most `most_bytes`; a ServiceError of `read`, too, is tried again.

        Raises ServiceError if there is no such reply after all tries.
        """

        async def ask() -> T:
            return read(await self._post(self._url + route, body, most_bytes))

        return await self._limit(ask)

    async def _post(self, url: str, body: Mapping[str, Any], most_bytes: int) -> Any:
        try:
            async with self._session().post(url, json=body, headers=self._headers) as reply:
                content = await read_at_most(reply, most_bytes)
                if reply.status == 200:
                    return json.loads(content)
                text = " ".join(content.decode(errors="replace").split())[:SHOWN]
                after_s = seconds_of(reply.headers.get("Retry-After"))
        except TooLarge as error:
            raise ServiceError(f"{url}: {error}") from error
        except (aiohttp.ClientError, ValueError, RecursionError) as error:  # no JSON, or nested too deeply
            raise ServiceError(f"{url}: {error!r}", is_away=nobody_listens(error)) from error
        raise ServiceError(f"{url} answered {reply.status}: {text}", passes=is_busy(reply.status), after_s=after_s)

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None or self._http.closed:
            # The limit counts calls and has their time limit.
            connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
            self._closes = asyncio.create_task(self._close_at_the_end(self._http))
        return self._http

    @staticmethod
    async def _close_at_the_end(http: aiohttp.ClientSession) -> None:
        """asyncio.run cancels what still runs when it ends, and waits for that."""
        try:
            await asyncio.Event().wait()
        finally:
            await http.close()


def api_key(setting: str, variable: str | None) -> str:
    """The key in an environment variable, which `setting` names; "" without one.

    Raises ValueError if the variable is not set: a key is never a setting, because settings are written to files.
    """
    if variable is None:
        return ""
    if not os.environ.get(variable):
        raise ValueError(f"{setting}={variable}: expected an environment variable that is set, with the key in it")
    return os.environ[variable]
