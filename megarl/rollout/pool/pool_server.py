"""One server as the pool sees it: its state, its load, its failures, its speed; and `Ask`, a running request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from megarl.processes.restarts import Restarts
from megarl.rollout.pool.pace import Done, Pace
from megarl.rollout.pool.slots import Meter
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.server_states import Phase, ServerState
from megarl.samples.sample import Completion

logger = logging.getLogger("megarl.rollout.pool.pool")

FAULTS = 3  # failed attempts in a row, or senseless replies, after which a server is not fit for service


class RolloutFailed(RuntimeError):
    """No server generated this completion; the message has the reason of every failed attempt."""


class ServerFailed(RuntimeError):
    """This attempt failed; a retry on another server, or later, may succeed."""


class FailedInside(ServerFailed):
    """The server is there and failed with this request: status 500."""


class Senseless(ServerFailed):
    """The reply is not one to this request.

    `sent`: identifies what was sent, which may have been several requests in one; None: this error is of all of them.
    """

    def __init__(self, why: str, sent: object = None) -> None:
        super().__init__(why)
        self.sent = self if sent is None else sent


class Untrustworthy(ServerFailed):
    """The server hangs, or has lost the weights: one such failure takes it out of service."""


class Refused(RuntimeError):
    """The server does not accept this request, which may be the fault of either."""


class Unreachable(RuntimeError):
    """No server has begun with the request: no connection, or status 503; not counted as an attempt.

    503 is the answer of a router without a live server, and of a server whose queue is full, where the request waited
    for too long, or that was restarted and does not hold the request's adapter.
    """


class NoFilesLeft(RuntimeError):
    """This process or machine has no open file left for a connection, which ends the run."""


class TakenOut(RuntimeError):
    """The request ended through no fault of the server, for example by a fence; not counted as an attempt."""


class Affinity(NamedTuple):
    """What keeps requests that share prefixes together, on a server, within it, and behind a router."""

    url: str | None  # of the server to prefer; None: any
    dp_rank: int  # of any server
    key: str  # for the router: requests of one key go to one server


@dataclass(frozen=True)
class PieceRequest:
    """What a piece of a completion is asked with."""

    prompt_ids: Sequence[int]  # of the prompt, and of the pieces before
    params: SamplingParams
    num_known: int = 0  # of so many of these tokens the caller has the columns; those of the piece may be zeros there
    began: int | None = None  # version with which the completion began that goes on here; None: it begins here
    affinity: Affinity | None = None  # of its session
    alone: bool = False  # with a salt that no other request has, so that it gets no KV from the cache


@dataclass(eq=False)
class PoolServer:
    """State of a server.  All times are seconds; points in time are of time.monotonic()."""

    url: str
    state: ServerState  # as its owner said last, or fenced by the pool
    rests: Restarts  # its failures in a row
    trusted: set[int] | None = None  # versions since it was fenced; None: not verified, all versions are accepted
    num_changes: int = 0  # of the state
    asks: set[Ask] = field(default_factory=set)  # running requests
    sessions: list[int] = field(default_factory=lambda: [0])  # open completions that prefer it, by data-parallel rank
    resting_until: float = 0.0
    num_faults: int = 0  # failed attempts in a row, of those at the same time one
    num_senseless: int = 0  # senseless replies since the last trust
    last_senseless: object = None  # what was sent for the last of them
    away_since: float | None = None  # when the first request did not reach it, if none did since
    num_tokens: int = 0  # of all replies
    generated_s: float = 0.0  # sum of the durations of their requests
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
        return self.state.phase is Phase.GENERATING

    @property
    def is_held(self) -> bool:
        return self.state.phase is Phase.HELD

    @property
    def is_fenced(self) -> bool:
        return self.state.phase is Phase.FENCED

    def update(self, state: ServerState) -> None:
        """Set the state that its owner, or the pool, has decided."""
        self.num_changes += 1
        if self.is_fenced and state.phase is Phase.HELD:
            return  # the pool has fenced it, which its owner does not know yet
        self.state = state
        self.pauses.set(self.is_held)
        if self.is_fenced:
            self.trusted, self.pace = set(), Pace()
            for ask in self.asks:
                ask.cut(TakenOut())
        elif self.in_service:
            if state.version is not None:
                self.trusted = (self.trusted or set()) | {state.version}
            self.resting_until, self.num_senseless = 0.0, 0
            self.succeeded()

    def unverified(self, completion: Completion) -> list[int]:
        """Versions that generated parts of this completion and are not, or not yet, trusted."""
        if self.trusted is None:
            return []
        return sorted({span.version for span in completion.versions} - self.trusted)

    def succeeded(self) -> None:
        """Forget earlier failures, except senseless replies."""
        self.rests.count = 0
        self.num_faults = 0
        self.away_since = None

    def fail(self, error: Exception, patience_s: float) -> str:
        """Note a failed request, after which the server rests; returns why it is not fit for service, or "".

        `patience_s`: for so long no request may reach it.
        """
        now = time.monotonic()
        is_resting = self.resting_until > now  # one crash fails many requests at once, but counts once
        if isinstance(error, Unreachable):
            self.away_since = self.away_since or now
        else:
            self.num_faults += not is_resting
        if isinstance(error, Senseless) and error.sent is not self.last_senseless:
            self.num_senseless, self.last_senseless = self.num_senseless + 1, error.sent
        if not is_resting:
            logger.warning("%s gets no requests for %g s: %s", self.url, self.rests.next_rest_s, error)
            self.resting_until = now + self.rests.next_rest_s
            self.rests.count += 1
        if isinstance(error, Untrustworthy):
            return str(error)
        if isinstance(error, Unreachable):
            is_gone = self.away_since is not None and now - self.away_since >= patience_s
            return f"no request has reached it for {patience_s:g} s; the last: {error}" if is_gone else ""
        if max(self.num_faults, self.num_senseless) < FAULTS:
            return ""
        return f"{FAULTS} requests {'in a row ' if self.num_faults >= FAULTS else ''}failed; the last: {error}"

    def rank_for(self, affinity: Affinity | None, slack: int) -> int | None:
        """The data-parallel rank of a session's next request; None: the server chooses.

        `slack`: by so many running requests a rank may be busier than the least busy one.
        """
        if affinity is None or len(self.sessions) == 1:
            return None
        running = Counter(ask.dp_rank for ask in self.asks)
        least = min(running[rank] for rank in range(len(self.sessions)))
        return affinity.dp_rank if running[affinity.dp_rank] - least <= slack else None

    def note_load(self) -> None:
        """Update the meters after its running requests have changed."""
        self.loads.set(self.load)
        self.busy.set(bool(self.asks))

    def generated_by(self, ask: Ask) -> int:
        """Tokens of a request that has ended; without a reply an estimate from the server's other replies."""
        if ask.num_tokens is not None:
            return ask.num_tokens
        rate = self.num_tokens / self.generated_s if self.generated_s else 0.0
        return min(ask.max_tokens, round(rate * (time.monotonic() - ask.begun)))


class Ask:
    """A running request of the current task: `with Ask(server, request) as ask: ...`.

    `cut` ends it from outside: the error then takes the place of the CancelledError.
    """

    def __init__(self, server: PoolServer, request: PieceRequest) -> None:
        task = asyncio.current_task()
        assert task is not None, "a request belongs to a task"
        self.server = server
        self.request = request
        self.max_tokens = request.params.max_new_tokens
        self._task, self._cancelling = task, task.cancelling()
        self._error: Exception | None = None
        self._changes, self._tokens = server.num_changes, server.num_tokens
        self.version = server.state.version  # of the weights at the beginning; None: not verified
        self.num_tokens: int | None = None  # of its reply
        self.done: Done | None = None  # its reply
        self._loads, self._pauses = server.loads.read(), server.pauses.read()
        self.begun = time.monotonic()
        self.dp_rank: int | None = None  # that it names
        self.rid = ""  # of the request; empty: not sent yet
        self.timer: asyncio.TimerHandle | None = None
        self.is_overdue = False

    def __enter__(self) -> Ask:
        self.server.asks.add(self)
        self.server.note_load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.asks.discard(self)
        self.server.note_load()
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
        """The `Done` of this request if its reply came now, with `cached_tokens` of the prompt cached."""
        now, server = time.monotonic(), self.server
        passed = max(now - self.begun, 1e-9)
        load = max(1.0, (server.loads.read() - self._loads) / passed)
        seconds = max(0.0, passed - (server.pauses.read() - self._pauses))
        computed = max(0, len(self.request.prompt_ids) - cached_tokens)
        return Done(computed, new_tokens, seconds, load, self.begun, now)

    @property
    def is_hung(self) -> bool:
        """Whether the server has generated nothing, for any request, since this one began."""
        return self.server.num_tokens == self._tokens

    @property
    def is_excused(self) -> bool:
        """Whether it is no failure that this request ended without a token.

        The state of the server changed meanwhile, or the request waited in its queue, while it generated tokens for
        others, until its time was over.  A reply that overtakes the driver's hold, which comes over a pipe, is not
        excused, and costs one of the attempts.
        """
        return self.server.num_changes != self._changes or (self.is_overdue and not self.is_hung)
