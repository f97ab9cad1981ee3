"""Load balancing over servers: a request goes to the least loaded one, and to another one if that fails.

Only servers with verified weights generate (`ServerState`).  A fence cancels a server's requests, a hold only keeps new
ones from it.  A completion is returned when all versions that generated a part of it are verified on its server.

A request has a limited number of attempts, each with a time limit, and a server that failed rests.  The pool waits
without a limit while no server is in service or none can be reached: their owner restarts them or gives them up.

A server that hangs, generates with weights from before its last push, fails again and again, or is slow (see `pace`),
is fenced and reported to `on_unfit`, if there is one: its requests are tried elsewhere, or wait for its restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megarl.io.traces import span
from megarl.processes.restarts import Restarts
from megarl.rollout.pool.pace import Pace
from megarl.rollout.pool.pool_server import (
    Affinity,
    Ask,
    NoFilesLeft,
    PieceRequest,
    PoolServer,
    Refused,
    RolloutFailed,
    ServerFailed,
    TakenOut,
    Unreachable,
)
from megarl.rollout.pool.sender import Sender
from megarl.rollout.pool.slots import Slots, Waiting
from megarl.rollout.server_states import Phase, ServerState
from megarl.rollout.settings import GenerationSettings
from megarl.rollout.wire_columns import ColumnsLost
from megarl.samples.sample import Completion

# Why tokens were wasted.  fenced: their server was taken out of service.  failed: their request failed, or the weights
# were not verified.  stale: their prefix had KV of other weights.  retracted: their server computed their KV again and
# lost their columns.  cancelled: they are not wanted any more.  lost: their completion, or another one of their group,
# failed.  unscored: no reward could score them, or too few of their group.
WASTE = ("fenced", "failed", "stale", "retracted", "cancelled", "lost", "unscored")
_COUNTED = ("tokens", "pieces", "stale_prefixes", "failed_requests", "slow_servers")
# The error with which a request ended -> why its tokens were wasted.
_CAUSES = {TakenOut: "fenced", ServerFailed: "failed", ColumnsLost: "retracted", asyncio.CancelledError: "cancelled"}

_LEAVE_LOOK_S = 0.05
_PACE_LOOK_S = 1.0
_LONGEST_REST_S = 16.0  # of a server that failed


class Piece(NamedTuple):
    """What one request generated: at least one token, all of them with verified weights."""

    completion: Completion  # without text; finish_reason "abort": ended by the server, or by the time limit
    url: str  # of its server


class EnginePool:
    """Example: async with EnginePool(urls, token, settings) as pool: await pool.generate(PieceRequest([5, 6], params)).

    Hold one of `slots` during calls of `generate`, as `generate_completion` does.  `on_unfit`: called with the url of a
    server that was fenced here, and the reason; its owner fences it too, and starts it again.  None: it fences none.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        settings: GenerationSettings,
        on_unfit: Callable[[str, str], None] | None = None,
    ) -> None:
        if not urls and not settings.fenced:
            raise ValueError("urls=[]: expected the url of at least one server")
        self.settings, self._on_unfit = settings, on_unfit
        self._servers = {url.rstrip("/"): self._new_server(url.rstrip("/")) for url in urls}
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()  # of this pool, of its sessions
        self.slots = Slots(settings.max_in_flight)
        # By so many requests a preferred server may be busier than others.
        self._slack = max(1, settings.max_in_flight // (8 * max(1, len(self._servers))))
        slack = max(1, self._slack // settings.dp_ranks)
        self._sender = Sender(token, settings, is_crowded=lambda: self.slots.are_awaited, slack=slack)
        self._slow_factor = settings.slow_factor if on_unfit else None
        self._watcher: asyncio.Task[None] | None = None
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

    @property
    def newest_version(self) -> int:
        """Of the weights that a server has, verified; 0 if none are."""
        return max((max(server.trusted or {0}) for server in self._servers.values()), default=0)

    def update(self, state: ServerState) -> None:
        """Set the state of a server; a server that the pool has fenced stays fenced if it is held."""
        self._servers[state.url.rstrip("/")].update(state)
        self._sender.changes.announce()

    def join(self, url: str, num_slots: int) -> None:
        """Add a server, and the number of completions that may run in addition."""
        self._servers[url.rstrip("/")] = self._new_server(url.rstrip("/"))
        self.slots.grow(num_slots)

    async def leave(self, url: str, num_slots: int) -> None:
        """Send this server no new requests, get back what it has generated, and forget it."""
        server = self._servers[url.rstrip("/")]
        server.update(ServerState(url, Phase.HELD))
        for ask in list(server.asks):
            self._sender.bring_back(ask)
        while server.asks:
            await asyncio.sleep(_LEAVE_LOOK_S)
        del self._servers[server.url]
        self.slots.shrink(num_slots)
        self._gone["busy_s"] += server.busy.read()
        self._gone["servers_s"] += time.monotonic() - server.since

    def _new_server(self, url: str) -> PoolServer:
        at_first = ServerState(url, Phase.FENCED if self.settings.fenced else Phase.GENERATING)
        rests = Restarts(rest_s=self.settings.rest_s, longest_rest_s=_LONGEST_REST_S)
        return PoolServer(url, at_first, rests, sessions=[0] * self.settings.dp_ranks)

    # ---- requests

    @contextlib.contextmanager
    def session(self, num_completions: int) -> Iterator[Affinity]:
        """A session for requests that share prefixes, and so a prefix cache."""
        key = f"{self._name}.{next(self._numbers)}"
        if not self._servers:
            yield Affinity(None, 0, key)
            return
        servers = [server for server in self._servers.values() if server.in_service] or list(self._servers.values())
        home = min(servers, key=lambda server: sum(server.sessions))
        rank = home.sessions.index(min(home.sessions))
        home.sessions[rank] += num_completions
        try:
            yield Affinity(home.url, rank, key)
        finally:
            home.sessions[rank] -= num_completions
            del self._moves[key]

    async def generate(
        self, request: PieceRequest, *, prefer: str | None = None, waiting: Waiting | None = None
    ) -> Piece:
        """One completion, or its first tokens if the server or the time limit ended it early.

        `prefer`: url of a server that is chosen if it is in service and not much busier than the least busy one.
        `waiting`: measures the time without a server.  The caller checks the prompt: see `check_prompt`.  Raises
        RolloutFailed if the request is refused, or if all attempts failed.
        """
        key = request.affinity.key if request.affinity else ""
        reasons: list[str] = []
        failed: set[PoolServer] = set()
        refused: list[tuple[PoolServer, Refused]] = []
        waiting = waiting or Waiting()
        num_stale = 0
        while len(reasons) <= self.settings.retries:
            with waiting:
                server = await self._pick(failed, prefer)
            try:
                # A router would send the same key to the same server, which has failed.
                affinity = request.affinity and request.affinity._replace(key=f"{key}.{self._moves[key]}")
                ask = Ask(server, replace(request, affinity=affinity, alone=num_stale > 1))
                completion, is_stale = await self._attempt(ask)
            except TakenOut:
                continue
            except ColumnsLost as error:  # in need of KV cache SGLang retracts new requests first: elsewhere is better
                if server in failed:
                    reasons.append(f"{server.url}: {error}")
                failed.add(server)
                self._moves[key] += 1
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
                self._moves[key] += 1
                continue
            if is_stale:
                # Once more, since by now the pool knows the version that generated this; then with a salt of its own.
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
        """Let a server rest after a failed request, or take it out of service."""
        if reason := server.fail(error, self.settings.timeout_s):
            self._take_out(server, reason)

    def _take_out(self, server: PoolServer, reason: str) -> None:
        """Fence a server and report it, if there is `on_unfit`."""
        if self._on_unfit and not server.is_fenced:
            server.update(ServerState(server.url, Phase.FENCED))
            self._sender.changes.announce()
            self._on_unfit(server.url, reason)

    async def _attempt(self, ask: Ask) -> tuple[Completion, bool]:
        """As Sender.send; counts the tokens."""
        cause = ""
        try:
            with ask, span("generate", server=ask.server.url, prompt_tokens=len(ask.request.prompt_ids)):
                reply = await self._sender.send(ask)
            self._judge(ask)
            return reply
        except (TakenOut, ServerFailed, ColumnsLost, asyncio.CancelledError) as error:
            cause = next(cause for kind, cause in _CAUSES.items() if isinstance(error, kind))
            if isinstance(error, ColumnsLost) and ask.is_excused:  # a push or the time limit ended it in the queue
                raise TakenOut from error
            raise
        except (Refused, Unreachable, NoFilesLeft):
            ask.num_tokens = 0  # it was refused, or not sent
            raise
        finally:
            num_tokens = ask.server.generated_by(ask)
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
                await self._sender.changes.wait(rest_s)

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raises RolloutFailed for ids outside the model's vocabulary, because a stock server crashes on them."""
        if not prompt_ids:
            raise RolloutFailed("the prompt is empty")
        num_ids = self.settings.num_ids
        if num_ids is not None and not 0 <= min(prompt_ids) <= max(prompt_ids) < num_ids:
            raise RolloutFailed(f"the prompt holds token ids outside 0 .. {num_ids - 1}")

    # ---- servers that are slow

    def _judge(self, ask: Ask) -> None:
        """Take a server that has answered out of service if it is slow."""
        server = ask.server
        assert ask.done is not None, "it has a reply"
        factor = self._slow_factor if server.in_service else None
        if reason := server.pace.add(ask.done, self._paces(server), factor):
            self._counts["slow_servers"] += 1
            self._take_out(server, reason)

    async def _watch(self, factor: float) -> None:
        """Let slow servers return what they have generated before the time limit, so that they are known sooner."""
        while True:
            await asyncio.sleep(_PACE_LOOK_S)
            for server in self._servers.values():
                asks = [ask for ask in server.asks if ask.rid and not ask.is_overdue] if server.in_service else []
                oldest = min(asks, key=lambda ask: ask.begun, default=None)
                if oldest and server.pace.is_late(oldest.so_far(oldest.max_tokens), self._paces(server), factor):
                    self._sender.hurry(oldest)

    def _paces(self, server: PoolServer) -> list[Pace]:
        """The paces of the other servers."""
        return [other.pace for other in self._servers.values() if other is not server and not other.is_fenced]

    # ---- counters

    def waste(self, cause: str, num_tokens: int) -> None:
        """Count tokens that are in no group; `cause`: one of WASTE."""
        assert cause in WASTE, f"tokens are wasted for {WASTE}, not for {cause}"
        self._counts[f"wasted_{cause}"] += num_tokens

    def counters(self) -> dict[str, float]:
        """`in_flight`: requests that are running now; the others are totals since the start.

        tokens, pieces: that servers generated.  wasted_*: tokens that are in no finished group, by cause; estimated for
        a request without a reply.  stale_prefixes: replies with KV of other weights.  failed_requests: without a reply
        or with a wrong one.  slow_servers: taken out of service as slow.  busy_s: sum over the servers of the time with
        a running request; servers_s: of all the time.
        """
        servers = self._servers.values()
        counts = self._counts + Counter(failed_requests=self._sender.joined.num_failed)
        return {
            "in_flight": float(sum(server.load for server in servers)),
            "busy_s": self._gone["busy_s"] + sum(server.busy.read() for server in servers),
            "servers_s": self._gone["servers_s"] + sum(time.monotonic() - server.since for server in servers),
            **{name: float(counts[name]) for name in _COUNTED},
            **{f"wasted_{cause}": float(counts[f"wasted_{cause}"]) for cause in WASTE},
        }
