"""Load balancing over servers: a request goes to the least loaded one, and to another one if that fails.

Only trusted servers generate.  `fence` takes a server out of service and cancels its requests.  `trust` adds a version
of the weights to those that the server may generate with.  A completion is returned only when all versions that
generated a part of it are trusted on its server.

All waits are bounded: a request has a limited number of attempts, each attempt has a timeout, and a server that failed
gets no request for a time that doubles with each failure up to a limit.  The exception: while all servers are fenced,
the pool waits for a `trust` without a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from megarl.rollout.protocol import Route, SamplingParams, auth_headers, error_message, generate_body, parse_completions
from megarl.sample import Completion, VersionSpan

_LONGEST_REST_S = 16.0
_CONNECT_S = 10.0


class RolloutFailed(RuntimeError):
    """No server generated these completions; the message has the reason of every failed attempt."""


class _ServerFailed(RuntimeError):
    """This attempt failed; a retry on another server, or later, may succeed."""


class _TakenOut(RuntimeError):
    """The request was cancelled by a fence; not counted as an attempt."""


@dataclass(eq=False)
class _Server:
    url: str
    load: int = 0  # requested completions without an answer yet
    failures: int = 0  # in a row
    resting_until: float = 0.0  # time.monotonic()
    fenced: bool = False
    trusted: set[int] | None = None  # versions of the weights; None: not verified, all versions are accepted
    adapter: tuple[str, int] | None = None  # name and version of the adapter that requests select
    asks: set[asyncio.Task[Any]] = field(default_factory=set)  # running requests

    def unverified(self, completions: Sequence[Completion]) -> list[int]:
        """Versions that generated parts of these completions and are not, or not yet, trusted."""
        if self.trusted is None:
            return []
        return sorted({span.version for c in completions for span in c.versions} - self.trusted)


class EnginePool:
    """Example: async with EnginePool(urls, token, timeout_s=120) as pool: await pool.generate([5, 6], 8, params).

    At most `max_in_flight` requests are sent at a time, over all servers; the others wait here, without a socket.
    `timeout_s`: of one attempt.  `retries`: after the first attempt.  `fenced`: servers need a `trust` first.
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
        fenced: bool = False,
    ) -> None:
        if not urls:
            raise ValueError("urls=[]: expected the url of at least one server")
        self._servers = [_Server(url.rstrip("/"), fenced=fenced) for url in urls]
        self._token, self._timeout_s, self._retries, self._rest_s = token, timeout_s, retries, rest_s
        self._max_in_flight = max_in_flight
        self._vocab_size = vocab_size
        self._slots = asyncio.Semaphore(max_in_flight)
        self._numbers = itertools.count()  # of attempts
        self._session: aiohttp.ClientSession | None = None
        self._changed = asyncio.Event()  # set, and replaced by a new one, at each fence and trust

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

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        """The server holds this version, verified: send it requests, and return completions of this version.

        `adapter`: this version is the adapter of this name on top of the server's weights.  Requests then select it,
        and a completion has this version for all its tokens: a server never changes the adapter of a running request.
        """
        server = self._named(url)
        server.trusted = (server.trusted or set()) | {version}
        server.adapter = None if adapter is None else (adapter, version)
        server.fenced, server.failures, server.resting_until = False, 0, 0.0
        self._tell()

    def fence(self, url: str) -> None:
        """Send this server no requests, retry its running ones elsewhere, and forget all its trusted versions."""
        server = self._named(url)
        server.fenced, server.trusted = True, set()
        for ask in server.asks:
            ask.cancel()
        self._tell()

    def _named(self, url: str) -> _Server:
        return next(server for server in self._servers if server.url == url.rstrip("/"))

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def generate(
        self, prompt_ids: Sequence[int], n: int, params: SamplingParams, rid: str | None = None
    ) -> list[Completion]:
        """n completions of one prompt, without text; an aborted one has finish_reason "abort" and its tokens so far.

        Raises RolloutFailed if the request is refused, or if all attempts failed.
        """
        self._check(prompt_ids)
        rid = rid or uuid.uuid4().hex
        reasons: list[str] = []
        tried: set[_Server] = set()
        async with self._slots:
            while len(reasons) <= self._retries:
                server = await self._pick(tried)
                tried.add(server)
                try:
                    # A new request id for each attempt: the previous attempt may still be running on its server.
                    return await self._ask(server, prompt_ids, n, params, f"{rid}.{next(self._numbers)}")
                except _TakenOut:
                    continue
                except _ServerFailed as error:
                    reasons.append(f"{server.url}: {error}")
                    self._rest(server)
        raise RolloutFailed(f"{len(reasons)} attempts failed: {'; '.join(reasons)}")

    async def _ask(
        self, server: _Server, prompt_ids: Sequence[int], n: int, params: SamplingParams, rid: str
    ) -> list[Completion]:
        ask = asyncio.create_task(self._written(server, generate_body(prompt_ids, n, params, rid), n, server.adapter))
        server.load += n
        server.asks.add(ask)
        try:
            return await ask
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                raise
            raise _TakenOut from None  # a fence cancelled the request, nobody cancelled this task
        finally:
            server.load -= n
            server.asks.discard(ask)
            ask.cancel()

    async def _written(
        self, server: _Server, body: dict[str, Any], n: int, adapter: tuple[str, int] | None
    ) -> list[Completion]:
        """The server's completions, once all their versions are trusted; a fence cancels this wait."""
        value = await self._post(server, body if adapter is None else {**body, "lora_path": adapter[0]})
        server.failures = 0
        try:
            completions = parse_completions(value, n)
        except ValueError as error:
            raise RolloutFailed(f"{server.url}: {error}") from error
        if adapter is not None:  # the server reports the version of the base weights
            completions = [replace(c, versions=_one_span(adapter[1], len(c.token_ids))) for c in completions]
        deadline = time.monotonic() + self._timeout_s
        while unverified := server.unverified(completions):
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                raise _ServerFailed(f"it wrote with unverified weights (version {unverified[0]})") from None
        return completions

    async def _post(self, server: _Server, body: dict[str, Any]) -> Any:
        assert self._session is not None, "enter the pool first: async with pool"
        try:
            async with self._session.post(server.url + Route.GENERATE, json=body) as reply:
                if reply.status != 200:
                    raise _refusal(server.url, reply.status, error_message(await reply.text(), reply.reason or ""))
                return await reply.json()
        except TimeoutError as error:
            raise _ServerFailed(f"no answer within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:  # ValueError: a body that is no JSON
            raise _ServerFailed(f"{type(error).__name__} {error}") from error

    async def _pick(self, tried: Collection[_Server]) -> _Server:
        """The least loaded server that is not fenced and not resting; servers not yet tried come first."""
        while True:
            now = time.monotonic()
            free = [server for server in self._servers if not server.fenced]
            awake = [server for server in free if server.resting_until <= now]
            if awake:
                fresh = [server for server in awake if server not in tried]
                return min(fresh or awake, key=lambda server: server.load)
            rest_s = min(server.resting_until for server in free) - now if free else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), rest_s)

    def _rest(self, server: _Server) -> None:
        now = time.monotonic()
        if server.resting_until > now:  # one crash fails many requests at once, but counts once
            return
        server.resting_until = now + min(self._rest_s * 2**server.failures, _LONGEST_REST_S)
        server.failures += 1

    def _check(self, prompt_ids: Sequence[int]) -> None:
        """Refuse ids outside the vocabulary, because a stock server crashes on them."""
        if not prompt_ids:
            raise RolloutFailed("the prompt is empty")
        if self._vocab_size is not None and not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocab_size:
            raise RolloutFailed(f"the prompt holds token ids outside 0 .. {self._vocab_size - 1}")


def _one_span(version: int, num_tokens: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(version, 0, num_tokens),) if num_tokens else ()


def _refusal(url: str, status: int, message: str) -> RuntimeError:
    """5xx, 408 and 429 are retried on another server; any other status would be the same on all servers."""
    if status >= 500 or status in (408, 429):
        return _ServerFailed(f"status {status}: {message}")
    return RolloutFailed(f"{url} refused the request with status {status}: {message}")
