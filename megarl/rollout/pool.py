"""Many servers as one: completions come from the least loaded, and from another one when a server fails.

Every wait has an end: a request's attempts are counted, each attempt has a time limit, and a server that failed rests
for a time that doubles up to a limit before it is asked again.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import aiohttp

from megarl.rollout.protocol import Route, SamplingParams, auth_headers, error_message, generate_body, parse_completions
from megarl.sample import Completion

_LONGEST_REST_S = 16.0
_CONNECT_S = 10.0


class RolloutFailed(RuntimeError):
    """No server wrote these completions; the message holds the reason of every attempt."""


class _ServerFailed(RuntimeError):
    """This attempt failed for a reason that another server, or a later moment, may not have."""


@dataclass(eq=False)
class _Server:
    url: str
    load: int = 0  # completions asked of it and not yet answered
    failures: int = 0  # in a row
    resting_until: float = 0.0  # time.monotonic()


class EnginePool:
    """Example: async with EnginePool(urls, token, timeout_s=120) as pool: await pool.generate([5, 6], 8, params).

    `max_in_flight` requests are on the wire at once, over all servers; the others wait here, without a socket.
    `timeout_s` limits one attempt, `retries` the number of further attempts.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        *,
        timeout_s: float,
        max_in_flight: int = 512,
        retries: int = 4,
        rest_s: float = 1.0,
        vocab_size: int | None = None,
    ) -> None:
        if not urls:
            raise ValueError("urls=[]: want the url of at least one server")
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._token, self._timeout_s, self._retries, self._rest_s = token, timeout_s, retries, rest_s
        self._max_in_flight = max_in_flight
        self._vocab_size = vocab_size
        self._slots = asyncio.Semaphore(max_in_flight)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EnginePool:
        self._session = aiohttp.ClientSession(
            headers=auth_headers(self._token),
            connector=aiohttp.TCPConnector(limit=self._max_in_flight),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=min(_CONNECT_S, self._timeout_s)),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None, "the pool was never entered"
        await self._session.close()

    async def generate(
        self, prompt_ids: Sequence[int], n: int, params: SamplingParams, rid: str | None = None
    ) -> list[Completion]:
        """n completions of one prompt, without text; an aborted one has finish_reason "abort" and what it wrote.

        Raises RolloutFailed when the request is refused, or when all attempts failed.
        """
        self._check(prompt_ids)
        rid = rid or uuid.uuid4().hex
        reasons: list[str] = []
        tried: set[_Server] = set()
        async with self._slots:
            for attempt in range(self._retries + 1):
                server = await self._pick(tried)
                tried.add(server)
                try:
                    # A new name each time: the attempt that was given up may still be dying on its server.
                    return await self._ask(server, prompt_ids, n, params, f"{rid}.{attempt}")
                except _ServerFailed as error:
                    reasons.append(f"{server.url}: {error}")
                    self._rest(server)
        raise RolloutFailed(f"{len(reasons)} attempts failed: {'; '.join(reasons)}")

    async def _ask(
        self, server: _Server, prompt_ids: Sequence[int], n: int, params: SamplingParams, rid: str
    ) -> list[Completion]:
        assert self._session is not None, "enter the pool first: async with pool"
        server.load += n
        try:
            async with self._session.post(
                server.url + Route.GENERATE, json=generate_body(prompt_ids, n, params, rid)
            ) as reply:
                if reply.status != 200:
                    raise _refusal(server.url, reply.status, error_message(await reply.text(), reply.reason or ""))
                value = await reply.json()
        except TimeoutError as error:
            raise _ServerFailed(f"no answer within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:  # ValueError: a body that is no JSON
            raise _ServerFailed(f"{type(error).__name__} {error}") from error
        finally:
            server.load -= n
        server.failures = 0
        try:
            return parse_completions(value, n)
        except ValueError as error:
            raise RolloutFailed(f"{server.url}: {error}") from error

    async def _pick(self, tried: Collection[_Server]) -> _Server:
        """The least loaded server that does not rest, one not yet tried if there is any; waits while all rest."""
        while True:
            now = time.monotonic()
            awake = [server for server in self._servers if server.resting_until <= now]
            if awake:
                fresh = [server for server in awake if server not in tried]
                return min(fresh or awake, key=lambda server: server.load)
            await asyncio.sleep(min(server.resting_until for server in self._servers) - now)

    def _rest(self, server: _Server) -> None:
        now = time.monotonic()
        if server.resting_until > now:  # one death fails many requests at once, and counts once
            return
        server.resting_until = now + min(self._rest_s * 2**server.failures, _LONGEST_REST_S)
        server.failures += 1

    def _check(self, prompt_ids: Sequence[int]) -> None:
        """A stock server dies of an id outside its vocabulary, so that is refused on this side."""
        if not prompt_ids:
            raise RolloutFailed("the prompt is empty")
        if self._vocab_size is not None and not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocab_size:
            raise RolloutFailed(f"the prompt holds token ids outside 0 .. {self._vocab_size - 1}")


def _refusal(url: str, status: int, message: str) -> RuntimeError:
    """5xx and "try later" are the server's trouble; any other refusal would be the same everywhere."""
    if status >= 500 or status in (408, 429):
        return _ServerFailed(f"status {status}: {message}")
    return RolloutFailed(f"{url} refused the request with status {status}: {message}")
