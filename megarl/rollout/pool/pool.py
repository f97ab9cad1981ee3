"""Load balancing over servers: a request goes to the least loaded one, and to another one if that fails.

Only trusted servers generate.  `trust` adds a version of the weights to those that a server may generate with, `fence`
takes a server out of service and cancels its requests, `hold` only keeps new requests from it.  What a server wrote is
returned only when all versions that generated a part of it are trusted on this server.

A request has a limited number of attempts, each attempt has a time limit, and a server that failed gets no request for
a time that doubles with each failure up to a limit.  Without a limit the pool waits for servers: for a `trust` while
none is in service, and while none can be reached.  Such a request has killed no server, and whoever owns the servers
restarts them or gives them up; the driver does so only between two training steps.

A server that hangs, writes with weights from before its last push, fails again and again, or is slow (see `pace`), is
fenced and reported to `on_unfit`, if there is one: its requests are tried elsewhere, or wait until its owner has
started it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from megarl.rollout.pool.meter import Waiting
from megarl.rollout.pool.pace import Pace
from megarl.rollout.pool.pool_server import (
    Affinity,
    Ask,
    NoFilesLeft,
    PoolServer,
    Refused,
    RolloutFailed,
    ServerFailed,
    TakenOut,
    Unreachable,
)
from megarl.rollout.pool.sender import Sender
from megarl.rollout.pool.slots import Slots
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.wire_columns import ColumnsLost, EngineColumn
from megarl.sample import Completion

__all__ = ["WASTE", "Affinity", "EnginePool", "Piece", "RolloutFailed"]

# Why tokens were wasted.  fenced: their server was taken out of service.  failed: their request failed, or nobody
# verified their weights.  stale: their prefix had KV of other weights.  retracted: their server computed their KV again
# and lost their columns with it.  cancelled: nobody wanted them any more.
# lost: their completion, or another one of their group, failed.  unscored: no reward could score them, or too few of
# their group.
WASTE = ("fenced", "failed", "stale", "retracted", "cancelled", "lost", "unscored")
_COUNTED = ("tokens", "pieces", "stale_prefixes", "failed_requests", "slow_servers")


_LEAVE_LOOK_S = 0.05
_PACE_LOOK_S = 1.0


class Piece(NamedTuple):
    """What one request wrote: at least one token, all of them with trusted weights."""

    completion: Completion  # without text; finish_reason "abort": ended by the server, or by the time limit
    url: str  # of the server that wrote it


class Session(NamedTuple):
    """See EnginePool.session."""

    url: str | None  # of a server; None: there is none now
    affinity: Affinity


class EnginePool:
    """Example: async with EnginePool(urls, token, timeout_s=120) as pool: await pool.generate([5, 6], params).

    Args:
        timeout_s: of one attempt; then the server is told to return what it has written so far.
        max_in_flight: size of `slots`.  Hold one during calls of `generate`, as `pieces.write` does.
        retries: after the first attempt.
        fenced: servers need a `trust` first.
        salted: the servers know salts of their prefix caches (Abilities.cache_salt), and keep KV in a push.
        dp_ranks: data-parallel ranks of each server, each with a prefix cache of its own.
        joins: short answers that are asked for at once travel in one request.
        columns: what is to travel with the tokens of every completion.
        num_ids: of the model's vocabulary, with the padding that a model may write too; None: not known.
        on_unfit: called with the url of a server that was fenced here, and the reason; its owner fences it too, and
            starts it again.  None: nobody does, so no server is fenced here.
        slow_factor: replies that take so many times as long as those of other servers are slow; None: no reply is.
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
        fenced: bool = False,
        salted: bool = False,
        dp_ranks: int = 1,
        joins: bool = False,
        columns: Sequence[EngineColumn] = (),
        num_ids: int | None = None,
        on_unfit: Callable[[str, str], None] | None = None,
        slow_factor: float | None = None,
    ) -> None:
        if not urls and not fenced:
            raise ValueError("urls=[]: expected the url of at least one server")
        self._fenced, self._dp_ranks = fenced, dp_ranks
        self._servers = {url.rstrip("/"): self._new_server(url.rstrip("/")) for url in urls}
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()  # of this pool, of its sessions
        self.slots = Slots(max_in_flight)
        # By so many requests a preferred server may be busier than others.
        self._slack = max(1, max_in_flight // (8 * max(1, len(self._servers))))
        how: dict[str, Any] = {"salted": salted, "columns": columns, "num_ids": num_ids, "joins": joins}
        how["slack"] = max(1, self._slack // dp_ranks)
        self._sender = Sender(token, timeout_s, is_crowded=lambda: self.slots.are_awaited, **how)
        self._timeout_s, self._on_unfit = timeout_s, on_unfit
        self._slow_factor = None if on_unfit is None else slow_factor
        self._watcher: asyncio.Task[None] | None = None
        self._retries, self._rest_s, self.num_ids = retries, rest_s, num_ids
        self._counts: Counter[str] = Counter()
        self._moves: Counter[str] = Counter()  # failed requests of each open session, by its key
        self._gone: dict[str, float] = {"busy_s": 0.0, "servers_s": 0.0}  # of servers that have left

    async def __aenter__(self) -> EnginePool:
        await self._sender.__aenter__()
        if self._slow_factor is not None:
            self._watcher = asyncio.create_task(self._watch(self._slow_factor))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        await self._sender.__aexit__()

    # ---- which servers may be asked

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        """The server holds this version, verified: send it requests, and return what it writes with this version.

        `adapter`: this version is the adapter of this name on top of the server's weights.  Requests then select it,
        and all their tokens have this version: a server never changes the adapter of a running request.
        """
        self._named(url).trust(version, adapter)
        self._sender.changed.tell()

    def fence(self, url: str) -> None:
        """Send this server no requests, retry its running ones elsewhere, and forget all its trusted versions."""
        self._named(url).fence()
        self._sender.changed.tell()

    def hold(self, url: str) -> None:
        """Send this server no new requests until the next `trust`; running ones may come back, also as aborted."""
        self._named(url).hold()

    def join(self, url: str, num_slots: int) -> None:
        """One more server; with it so many more completions run at a time."""
        self._servers[url.rstrip("/")] = self._new_server(url.rstrip("/"))
        self.slots.grow(num_slots)

    async def leave(self, url: str, num_slots: int) -> None:
        """Send this server no new requests, get back what it has written, and forget it."""
        server = self._named(url)
        server.hold()
        for ask in list(server.asks):
            self._sender.bring_back(server, ask)
        while server.asks:
            await asyncio.sleep(_LEAVE_LOOK_S)
        del self._servers[server.url]
        self.slots.shrink(num_slots)
        self._gone["busy_s"] += server.busy.read()
        self._gone["servers_s"] += time.monotonic() - server.since

    def _new_server(self, url: str) -> PoolServer:
        return PoolServer(url, fenced=self._fenced, sessions=[0] * self._dp_ranks)

    def _named(self, url: str) -> PoolServer:
        return self._servers[url.rstrip("/")]

    # ---- requests

    @contextlib.contextmanager
    def session(self, num_completions: int) -> Iterator[Session]:
        """For requests that share prefixes, and so a prefix cache: pass its url as `prefer`, and its affinity."""
        key = f"{self._name}.{next(self._numbers)}"
        if not self._servers:
            yield Session(None, Affinity(0, key))
            return
        servers = [server for server in self._servers.values() if server.in_service] or list(self._servers.values())
        home = min(servers, key=lambda server: sum(server.sessions))
        rank = home.sessions.index(min(home.sessions))
        home.sessions[rank] += num_completions
        try:
            yield Session(home.url, Affinity(rank, key))
        finally:
            home.sessions[rank] -= num_completions
            del self._moves[key]

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        prefer: str | None = None,
        affinity: Affinity | None = None,
        waiting: Waiting | None = None,
        num_known: int = 0,
        began: int | None = None,
    ) -> Piece:
        """One completion, or the first tokens of it if the server or the time limit ended it early.

        `prefer`: url of a server that is chosen if it is in service and not much busier than the least busy one.
        `affinity`: of its session.  `waiting`: measures the time without a server.  `num_known`: of so many tokens of
        the prompt the caller has the columns; those of the piece may be zeros there.  `began`: the version of the
        weights with which the completion began that goes on here, and may keep its KV; None: it begins here.
        The caller checks the prompt: see `check_prompt`.  Raises RolloutFailed if the request is refused, or if all
        attempts failed.
        """
        reasons: list[str] = []
        failed: set[PoolServer] = set()
        refused: list[tuple[PoolServer, Refused]] = []
        waiting = waiting or Waiting()
        num_stale = 0
        while len(reasons) <= self._retries:
            with waiting:
                server = await self._pick(failed, prefer)
            try:
                how: dict[str, Any] = {"alone": num_stale > 1, "num_known": num_known, "began": began}
                # A router would send the same key to the same server, which has failed.
                how["affinity"] = affinity and affinity._replace(key=f"{affinity.key}.{self._moves[affinity.key]}")
                completion, is_stale = await self._ask(server, prompt_ids, params, **how)
            except TakenOut:
                continue
            except ColumnsLost as error:  # in need of KV cache SGLang retracts new requests first: elsewhere is better
                if server in failed:
                    reasons.append(f"{server.url}: {error}")
                failed.add(server)
                self._moves[affinity.key if affinity else ""] += 1
                continue
            except Refused as error:  # one other server is asked, because the fault may be the server's
                refused.append((server, error))
                failed.add(server)
                if len(refused) > 1 or not any(other.in_service for other in self._servers.values() if other != server):
                    raise RolloutFailed(f"{server.url} refused the request with {error}") from error
                continue
            except (ServerFailed, Unreachable) as error:
                failed.add(server)
                self._counts["failed_requests"] += 1
                self._blame(server, error)
                if isinstance(error, ServerFailed):
                    reasons.append(f"{server.url}: {error}")
                self._moves[affinity.key if affinity else ""] += 1
                continue
            if is_stale:
                # Once more, since by now the pool knows the version that wrote this; then with a salt of its own.
                num_stale += 1
                self._counts["stale_prefixes"] += 1
                self.waste("stale", len(completion.token_ids))
                if num_stale > 2:
                    reasons.append(f"{server.url}: its prefix cache does not keep salts apart")
                    failed.add(server)
                continue
            for other, refusal in refused:
                self._blame(other, refusal)
            self._counts["pieces"] += 1
            return Piece(completion, server.url)
        raise RolloutFailed(f"{len(reasons)} attempts failed: {'; '.join(reasons)}")

    def _blame(self, server: PoolServer, error: Exception) -> None:
        """A request failed on this server: let it rest, or take it out of service."""
        reason = server.suspicion(error, self._timeout_s)
        server.rest(self._rest_s, error)
        if reason:
            self._take_out(server, reason)

    def _take_out(self, server: PoolServer, reason: str) -> None:
        """Fence a server and report it, if it has an owner who is told."""
        if self._on_unfit is not None and not server.fenced:
            server.fence()
            self._sender.changed.tell()
            self._on_unfit(server.url, reason)

    async def _ask(
        self, server: PoolServer, prompt_ids: Sequence[int], params: SamplingParams, **how: Any
    ) -> tuple[Completion, bool]:
        """As Sender.write; counts the tokens."""
        ask = Ask(server, len(prompt_ids), params.max_new_tokens)
        cause = ""
        try:
            with ask:
                written = await self._sender.write(server, ask, prompt_ids, params, **how)
            self._judge(server, ask)
            return written
        except TakenOut:
            cause = "fenced"
            raise
        except ServerFailed:
            cause = "failed"
            raise
        except ColumnsLost as error:
            cause = "retracted"
            if ask.is_excused:  # a push or the time limit ended it in the queue
                raise TakenOut from error
            raise
        except asyncio.CancelledError:
            cause = "cancelled"
            raise
        except (Refused, Unreachable, NoFilesLeft):
            ask.num_tokens = 0  # it was refused, or not sent
            raise
        finally:
            num_tokens = server.written_by(ask)
            self._counts["tokens"] += num_tokens
            if cause:
                self.waste(cause, num_tokens)

    async def _pick(self, failed: Collection[PoolServer], prefer: str | None) -> PoolServer:
        """The least loaded server in service that is not resting; those that have not failed come first."""
        while True:
            now = time.monotonic()
            servers = [server for server in self._servers.values() if server.in_service]
            awake = [server for server in servers if server.resting_until <= now]
            if awake:
                awake = [server for server in awake if server not in failed] or awake
                least = min(awake, key=lambda server: server.load)
                home = self._servers.get((prefer or "").rstrip("/"), least)  # it may have left
                return home if home in awake and home.load <= least.load + self._slack else least
            rest_s = min(server.resting_until for server in servers) - now if servers else None
            with contextlib.suppress(TimeoutError):
                await self._sender.changed.wait(rest_s)

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raises RolloutFailed for ids outside the model's vocabulary, because a stock server crashes on them."""
        if not prompt_ids:
            raise RolloutFailed("the prompt is empty")
        if self.num_ids is not None and not 0 <= min(prompt_ids) <= max(prompt_ids) < self.num_ids:
            raise RolloutFailed(f"the prompt holds token ids outside 0 .. {self.num_ids - 1}")

    # ---- servers that are slow

    def _judge(self, server: PoolServer, ask: Ask) -> None:
        """A server has answered: take it out of service if it is slow."""
        assert ask.done is not None, "it has a reply"
        factor = self._slow_factor if server.in_service else None
        if reason := server.pace.add(ask.done, self._paces(server), factor):
            self._counts["slow_servers"] += 1
            self._take_out(server, reason)

    async def _watch(self, factor: float) -> None:
        """Let slow servers return what they have written before the time limit, so that they are known sooner."""
        while True:
            await asyncio.sleep(_PACE_LOOK_S)
            for server in self._servers.values():
                asks = [ask for ask in server.asks if ask.rid and not ask.is_overdue] if server.in_service else []
                oldest = min(asks, key=lambda ask: ask.begun, default=None)
                if oldest and server.pace.is_late(oldest.so_far(oldest.max_tokens), self._paces(server), factor):
                    self._sender.hurry(server, oldest)

    def _paces(self, server: PoolServer) -> list[Pace]:
        """Those of the others."""
        return [other.pace for other in self._servers.values() if other is not server and not other.fenced]

    # ---- counters

    def waste(self, cause: str, num_tokens: int) -> None:
        """Count tokens that were written for nothing; `cause`: one of WASTE."""
        assert cause in WASTE, f"tokens are wasted for {WASTE}, not for {cause}"
        self._counts[f"wasted_{cause}"] += num_tokens

    def counters(self) -> dict[str, float]:
        """`in_flight`: requests that are running now; the others are totals since the start.

        tokens, pieces: written by servers.  wasted_*: tokens of these that are in no finished group, by cause; those of
        a request without a reply are estimated.  stale_prefixes: replies with KV of other weights.  failed_requests:
        without a reply, or with one that cannot be right.  slow_servers: that were taken out of service as slow.
        busy_s: sum over the servers of the time with a running request; servers_s: of all the time.
        """
        servers = self._servers.values()
        return {
            "in_flight": float(sum(server.load for server in servers)),
            "busy_s": self._gone["busy_s"] + sum(server.busy.read() for server in servers),
            "servers_s": self._gone["servers_s"] + sum(time.monotonic() - server.since for server in servers),
            **{name: float(self._counts[name]) for name in _COUNTED},
            **{f"wasted_{cause}": float(self._counts[f"wasted_{cause}"]) for cause in WASTE},
        }
