"""One server as the pool sees it: may it be asked, how busy is it, what did it write; and `Ask`, a running request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from megarl.rollout.pool.meter import Meter
from megarl.rollout.pool.pace import Done, Pace
from megarl.sample import Completion

logger = logging.getLogger("megarl.rollout.pool.pool")

_LONGEST_REST_S = 16.0
FAULTS = 3  # failed attempts in a row, or senseless replies, after which a server is not fit for service


class RolloutFailed(RuntimeError):
    """No server generated this completion; the message has the reason of every failed attempt."""


class ServerFailed(RuntimeError):
    """This attempt failed; a retry on another server, or later, may succeed."""


class FailedInside(ServerFailed):
    """The server is there and says that it failed with this request: status 500."""


class Senseless(ServerFailed):
    """The reply is not one to this request.

    `sent`: identifies what was sent, which may have been several requests in one; None: this error is of all of them.
    """

    def __init__(self, why: str, sent: object = None) -> None:
        super().__init__(why)
        self.sent = self if sent is None else sent


class Untrustworthy(ServerFailed):
    """One such failure is enough to take the server out of service: it hangs, or it has lost the weights."""


class Refused(RuntimeError):
    """The server does not take this request, which may be the fault of either."""


class Unreachable(RuntimeError):
    """No server has begun with the request: no connection, or status 503; not counted as an attempt.

    503 is what a router without a live server answers, and a server whose queue is full, or where the request waited
    for too long.  A server that was started again and does not hold the request's adapter has not begun either.
    """


class NoFilesLeft(RuntimeError):
    """No connection can be opened, to no server; ends the run, because only its user can change that."""


class TakenOut(RuntimeError):
    """The request ended through no fault of the server, for example by a fence; not counted as an attempt."""


class Affinity(NamedTuple):
    """What keeps requests that share prefixes together, within a server and behind a router."""

    dp_rank: int  # of any server
    key: str  # for the router: requests of one key go to one server


@dataclass(eq=False)
class PoolServer:
    """State of a server.  All times are seconds; points in time are of time.monotonic()."""

    url: str
    fenced: bool = False
    held: bool = False  # gets no new requests; what runs may come back
    trusted: set[int] | None = None  # versions of the weights; None: not verified, all versions are accepted
    latest: int | None = None  # of the last trust
    adapter: tuple[str, int] | None = None  # name and version of the adapter that requests select
    num_changes: int = 0  # of trust, fence and hold
    asks: set[Ask] = field(default_factory=set)  # running requests
    sessions: list[int] = field(default_factory=lambda: [0])  # open completions that prefer it, by data-parallel rank
    failures: int = 0  # in a row
    resting_until: float = 0.0
    num_faults: int = 0  # failed attempts in a row, of those at the same time one
    num_senseless: int = 0  # senseless replies since the last trust
    last_senseless: object = None  # what was sent for the last of them
    away_since: float | None = None  # when the first request did not reach it, if none did since
    num_tokens: int = 0  # of all replies
    wrote_s: float = 0.0  # sum of the durations of the requests that wrote them
    since: float = field(default_factory=time.monotonic)
    pace: Pace = field(default_factory=Pace)  # since the last fence
    busy: Meter = field(default_factory=Meter)  # time with at least one running request
    loads: Meter = field(default_factory=Meter)  # running requests, times seconds
    pauses: Meter = field(default_factory=Meter)  # time in which it was held

    @property
    def load(self) -> int:
        """Running requests."""
        return len(self.asks)

    @property
    def in_service(self) -> bool:
        return not (self.fenced or self.held)

    @property
    def newest(self) -> int | None:
        """The newest trusted version."""
        return max(self.trusted) if self.trusted else None

    def trust(self, version: int, adapter: str | None) -> None:
        self.trusted, self.latest = (self.trusted or set()) | {version}, version
        self.adapter = None if adapter is None else (adapter, version)
        self.fenced, self.held, self.resting_until, self.num_senseless = False, False, 0.0, 0
        self.pauses.set(False)
        self.succeeded()
        self.num_changes += 1

    def fence(self) -> None:
        self.fenced, self.trusted, self.latest, self.pace = True, set(), None, Pace()
        self.num_changes += 1
        for ask in self.asks:
            ask.cut(TakenOut())

    def hold(self) -> None:
        self.held = True
        self.pauses.set(True)
        self.num_changes += 1

    def unverified(self, completion: Completion) -> list[int]:
        """Versions that generated parts of this completion and are not, or not yet, trusted."""
        if self.trusted is None:
            return []
        return sorted({span.version for span in completion.versions} - self.trusted)

    def succeeded(self) -> None:
        """Nothing that failed before counts any more, except senseless replies."""
        self.failures, self.num_faults, self.away_since = 0, 0, None

    def suspicion(self, error: Exception, patience_s: float) -> str:
        """Count a failed request, before `rest`; returns why the server is not fit for service, or an empty string.

        `patience_s`: for so long no request may reach it.
        """
        now = time.monotonic()
        if isinstance(error, Untrustworthy):
            return str(error)
        if isinstance(error, Unreachable):
            self.away_since = self.away_since or now
            is_gone = now - self.away_since >= patience_s
            return f"no request has reached it for {patience_s:g} s; the last: {error}" if is_gone else ""
        self.num_faults += self.resting_until <= now
        if isinstance(error, Senseless) and error.sent is not self.last_senseless:
            self.num_senseless, self.last_senseless = self.num_senseless + 1, error.sent
        if max(self.num_faults, self.num_senseless) < FAULTS:
            return ""
        return f"{FAULTS} requests {'in a row ' if self.num_faults >= FAULTS else ''}failed; the last: {error}"

    def rest(self, rest_s: float, why: Exception) -> None:
        """After a failure: no requests for `rest_s`, twice as long after each further failure, up to a limit."""
        now = time.monotonic()
        if self.resting_until > now:  # one crash fails many requests at once, but counts once
            return
        rest_s = min(rest_s * 2**self.failures, _LONGEST_REST_S)
        logger.warning("%s gets no requests for %g s: %s", self.url, rest_s, why)
        self.resting_until = now + rest_s
        self.failures += 1

    def rank_for(self, affinity: Affinity | None, slack: int) -> int | None:
        """The data-parallel rank of a session's next request; None: the server chooses, or that rank is too busy.

        `slack`: by so many running requests a rank may be busier than the least busy one.
        """
        if affinity is None or len(self.sessions) == 1:
            return None
        running = Counter(ask.dp_rank for ask in self.asks)
        least = min(running[rank] for rank in range(len(self.sessions)))
        return affinity.dp_rank if running[affinity.dp_rank] - least <= slack else None

    def begin(self, ask: Ask) -> None:
        self.asks.add(ask)
        self._count()

    def end(self, ask: Ask) -> None:
        self.asks.discard(ask)
        self._count()

    def _count(self) -> None:
        self.loads.set(self.load)
        self.busy.set(bool(self.asks))

    def written_by(self, ask: Ask) -> int:
        """Tokens of a request that has ended; without a reply about as many as others wrote in this time."""
        if ask.num_tokens is not None:
            return ask.num_tokens
        rate = self.num_tokens / self.wrote_s if self.wrote_s else 0.0
        return min(ask.max_tokens, round(rate * (time.monotonic() - ask.begun)))


class Ask:
    """A running request of the current task.

    `cut` ends it from outside: the error then takes the place of the CancelledError.

        with Ask(server, prompt_tokens, max_tokens) as ask:
            ...
    """

    def __init__(self, server: PoolServer, prompt_tokens: int, max_tokens: int) -> None:
        task = asyncio.current_task()
        assert task is not None, "a request belongs to a task"
        self._server, self._task, self._cancelling = server, task, task.cancelling()
        self._error: Exception | None = None
        self._changes, self._tokens = server.num_changes, server.num_tokens
        self.version = server.latest  # of the weights at the beginning; None: not verified
        self.prompt_tokens, self.max_tokens = prompt_tokens, max_tokens
        self.num_tokens: int | None = None  # of its reply
        self.done: Done | None = None  # its reply
        self._loads, self._pauses = server.loads.read(), server.pauses.read()
        self.begun = time.monotonic()
        self.dp_rank: int | None = None  # that it names
        self.rid = ""  # of the request; empty: not sent yet
        self.timer: asyncio.TimerHandle | None = None
        self.is_overdue = False

    def __enter__(self) -> Ask:
        self._server.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.end(self)
        self.stop_clock()
        # Cancelled by someone else too: then the CancelledError goes on.
        if self._error is not None and self._task.uncancel() <= self._cancelling:
            raise self._error from None

    def cut(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._task.cancel()

    def stop_clock(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def so_far(self, new_tokens: int, cached_tokens: int = 0) -> Done:
        """What it would be, if its reply came now with so many tokens, `cached_tokens` of the prompt not computed."""
        now, server = time.monotonic(), self._server
        passed = max(now - self.begun, 1e-9)
        load = max(1.0, (server.loads.read() - self._loads) / passed)
        seconds = max(0.0, passed - (server.pauses.read() - self._pauses))
        computed = max(0, self.prompt_tokens - cached_tokens)
        return Done(computed, new_tokens, seconds, load, self.begun, now)

    @property
    def is_hung(self) -> bool:
        """Whether the server has written nothing, for any request, since this one began."""
        return self._server.num_tokens == self._tokens

    @property
    def is_excused(self) -> bool:
        """Whether it is no failure that this request ended without a token.

        Either the driver changed something about the server meanwhile, or it waited in the queue of a server that
        wrote tokens for others until its time was over.  The driver's hold comes over a pipe and its abort through the
        server: a reply that overtakes the hold is not excused, and costs one of the attempts.
        """
        server = self._server
        return server.num_changes != self._changes or (self.is_overdue and not self.is_hung)
