"""Servers and collectors in virtual time: a run's schedule without a process, a request or a second of waiting.

`VirtualCollectors` stands for a run's `Collectors`, and has of its methods those that a prefetcher calls.
Each server decodes up to `max_running` requests at a time, each at a constant rate.  Time passes only in `wait` and in
`sleep`, which stands for the driver's own work.  Nothing is random: what happens depends only on the lengths and on
the calls.

A completion is written in pieces of `piece_tokens`.  What a finished piece brought stays when a server dies or is
fenced; the piece that was being written is lost.  A push changes the version between two tokens of a completion.
"""

from __future__ import annotations

import heapq
import itertools
import math
import zlib
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.data.prompts import Prompts
from megarl.rollout.collector.collector_client import Collectors, Ticket
from megarl.rollout.collector.messages import Order
from megarl.rollout.protocol import SamplingParams
from megarl.samples.sample import Completion, LostRollout, Prompt, Row, Sample, TurnSpan, VersionSpan

Lengths = Callable[[Prompt, int], Sequence[int]]  # tokens of completions 0..n-1 of a prompt

FAILED, FENCED, KILLED, CANCELLED = "failed", "fenced", "collector", "cancelled"  # why tokens are lost
_ALMOST = 1e-9  # of a token: rounding of times


@dataclass(eq=False)
class _Server:
    url: str
    collector: int
    awake: bool  # it gets requests
    history: list[tuple[float, int]] = field(default_factory=list)  # (since when, version)
    running: set[_Writing] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Order:
    """A ticket that is not finished."""

    ticket: Ticket
    collector: int
    params: SamplingParams
    greedy: bool
    writings: list[_Writing] = field(default_factory=list)
    open: int = 0  # completions that are not finished


@dataclass(eq=False, slots=True)
class _Writing:
    """A completion that is being written."""

    order: _Order
    index: int
    length: int
    done: int = 0  # tokens that are kept
    begun: float = 0.0  # when its server began to write the token behind them
    stops: int = 0  # its server writes up to here
    server: _Server | None = None
    runs: int = 0  # how often a server began it: an event of an earlier one means nothing
    spans: list[tuple[int, int, int]] = field(default_factory=list)  # version, start, end


class VirtualCollectors(Collectors):
    """Example:

        collectors = VirtualCollectors(lambda prompt, n: [5] * n, servers=2, max_running=4, tokens_per_s=10.0)
        tickets = collectors.submit(prompts, n=4, params=SamplingParams())
        while any(ticket.group is None for ticket in tickets):
            collectors.wait()
        collectors.sleep(2.0)                  # the driver trains
        collectors.push(1)                     # all servers have version 1 from now on
        collectors.at(3.5, lambda: collectors.die(collectors.urls[0]))

    Units are tokens and virtual seconds.  `version`: of all servers at the beginning; None: they get no request before
    `trust`.  `gather_s`: `wait` returns with all that finishes so soon after the first.  `whole` False: completions
    have no list of tokens, only their length, which is enough for large simulations.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        servers: int = 2,
        max_running: int = 4,
        tokens_per_s: float = 1.0,
        piece_tokens: int = 0,
        num_collectors: int | None = None,
        version: int | None = 0,
        gather_s: float = 0.0,
        reward: Callable[[Prompt, int], float] = lambda prompt, index: float(index % 2),
        is_lost: Callable[[Prompt], bool] = lambda prompt: False,
        whole: bool = True,
    ) -> None:
        self.now = 0.0
        self.max_running, self.tokens_per_s, self.piece_tokens = max_running, tokens_per_s, piece_tokens
        self.num_collectors = num_collectors or -(-servers // 8)
        self._lengths, self._reward, self._is_lost = lengths, reward, is_lost
        self._whole, self._gather_s = whole, gather_s
        self._servers = {
            f"http://server-{i}": _Server(f"http://server-{i}", i % self.num_collectors, version is not None)
            for i in range(servers)
        }
        for server in self._servers.values():
            server.history = [] if version is None else [(0.0, version)]
        self._of_collector = [
            [server for server in self._servers.values() if server.collector == index]
            for index in range(self.num_collectors)
        ]
        self._queues: list[deque[_Writing]] = [deque() for _ in range(self.num_collectors)]
        self._orders: dict[Ticket, _Order] = {}
        self._turn = itertools.cycle(range(self.num_collectors))
        self._events: list[tuple[float, int, Any, int]] = []  # time, number, a _Writing or a function, its run
        self._numbers = itertools.count()
        self._inbox: list[_Order] = []
        self._tokens = 0  # written by servers
        self._wasted: Counter[str] = Counter()

    # ---- what a driver calls

    @property
    def urls(self) -> list[str]:
        return list(self._servers)

    def submit(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int,
        params: SamplingParams,
        greedy: bool = False,
        urgent: bool = False,
    ) -> list[Ticket]:
        """Begin n completions of each prompt, and with `greedy` one more; none is urgent here."""
        tickets = []
        for prompt in prompts:
            order = _Order(
                Ticket(Order(len(self._orders), prompt, n, params, greedy)), next(self._turn), params, greedy
            )
            self._orders[order.ticket] = order
            tickets.append(order.ticket)
            self._begin(order, n + greedy)
        return tickets

    def wait(self, timeout_s: float = 1.0) -> bool:
        """Let time pass until a group is finished, `timeout_s` at most, and fill tickets.  False: none was."""
        deadline = self.now + timeout_s
        while not self._inbox:
            if not self._events or self._events[0][0] > deadline:
                self.now = deadline
                return False
            self._next_event()
        if self._gather_s:
            self._pass_time(min(deadline, self.now + self._gather_s))
        for order in self._inbox:
            order.ticket.group = self._group(order)
        self._inbox.clear()
        return True

    def cancel(self, tickets: Iterable[Ticket]) -> None:
        """Stop what is not wanted any more."""
        cancelled = dict.fromkeys(tickets)
        for order in [self._orders.pop(ticket) for ticket in cancelled if ticket in self._orders]:
            for writing in order.writings:
                self._interrupt(writing, keep=0, because=CANCELLED)
                self._wasted[CANCELLED] += writing.done
                writing.runs += 1
                writing.order.open = -1  # what waits in the queue of a collector is left out there
        self._inbox = [order for order in self._inbox if order.ticket not in cancelled]
        for index in range(self.num_collectors):
            self._fill(index)

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        """The server holds this version: it gets requests, and what it writes from now on has this version."""
        server = self._servers[url]
        server.awake = True
        if not server.history or server.history[-1][1] != version:
            server.history.append((self.now, version))
        self._fill(server.collector)

    def fence(self, url: str) -> None:
        """No more requests; what runs there is asked elsewhere, from its last finished piece on."""
        self._stop(self._servers[url], FENCED)

    def hold(self, url: str) -> None:
        """No more requests until the next `trust`; what runs there goes on to the end of its piece."""
        server = self._servers[url]
        server.awake = False
        if self.piece_tokens:
            for writing in server.running:
                at = self._written(writing)
                pieces = max(1, math.ceil((at - writing.done) / self.piece_tokens))
                self._schedule(writing, min(writing.length, writing.done + pieces * self.piece_tokens))

    @property
    def counters(self) -> dict[str, float]:
        """in_flight, queued: completions now; tokens and wasted_CAUSE: written so far, and written in vain."""
        running = sum(len(server.running) for server in self._servers.values())
        queued = sum(writing.order.open >= 0 for queue in self._queues for writing in queue)
        out = {"in_flight": float(running + queued), "queued": float(queued), "tokens": float(self._tokens)}
        out["tokens"] += sum(self._written(w) - w.done for s in self._servers.values() for w in s.running)
        return out | {f"wasted_{cause}": float(count) for cause, count in self._wasted.items()}

    # ---- what a test or a simulation does to them

    def sleep(self, seconds: float) -> None:
        """The driver is busy with something else; servers go on."""
        self._pass_time(self.now + seconds)

    def push(self, version: int) -> None:
        """`trust` for all servers that get requests."""
        for server in self._servers.values():
            if server.awake:
                self.trust(server.url, version)

    def at(self, time: float, act: Callable[[], object]) -> None:
        """Call `act` when the clock shows `time`."""
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), act, 0))

    def die(self, url: str) -> None:
        """The server ends.  A later `trust` is its next life."""
        server = self._servers[url]
        self._stop(server, FAILED)
        server.history.clear()

    def kill_collector(self, index: int) -> None:
        """A collector's process ends and is started again: its open orders begin from nothing."""
        for server in self._of_collector[index]:
            for writing in list(server.running):
                self._interrupt(writing, keep=0, because=KILLED)
        orders = [order for order in self._orders.values() if order.collector == index and order.open > 0]
        self._queues[index].clear()
        for order in orders:
            count = len(order.writings)
            for writing in order.writings:
                self._wasted[KILLED] += writing.done
                writing.runs += 1
            order.writings.clear()
            self._begin(order, count)

    # ---- inside

    def _begin(self, order: _Order, count: int) -> None:
        lengths = self._lengths(order.ticket.order.prompt, count)
        most = order.params.max_new_tokens
        order.writings = [_Writing(order, index, min(int(lengths[index]), most)) for index in range(count)]
        order.open = count
        self._queues[order.collector].extend(order.writings)
        self._fill(order.collector)

    def _fill(self, collector: int) -> None:
        """Start what waits, in order, each at the least busy server of the collector."""
        queue, servers = self._queues[collector], self._of_collector[collector]
        while queue:
            if queue[0].order.open < 0:  # cancelled
                queue.popleft()
                continue
            free = [server for server in servers if server.awake and len(server.running) < self.max_running]
            if not free:
                return
            self._start(queue.popleft(), min(free, key=lambda server: len(server.running)))

    def _start(self, writing: _Writing, server: _Server) -> None:
        writing.server, writing.begun = server, self.now
        server.running.add(writing)
        self._schedule(writing, writing.length)

    def _schedule(self, writing: _Writing, stops: int) -> None:
        writing.runs += 1
        writing.stops = stops
        time = writing.begun + (stops - writing.done) / self.tokens_per_s
        heapq.heappush(self._events, (time, next(self._numbers), writing, writing.runs))

    def _pass_time(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._next_event()
        self.now = max(self.now, until)

    def _next_event(self) -> None:
        time, _, what, run = heapq.heappop(self._events)
        if not isinstance(what, _Writing):
            self.now = max(self.now, time)
            what()
        elif run == what.runs:
            self.now = max(self.now, time)
            self._complete(what)

    def _complete(self, writing: _Writing) -> None:
        """A server has written all that it was asked for."""
        server, order = writing.server, writing.order
        assert server is not None, "what ends was running"
        self._leave(writing, writing.stops)
        if writing.done < writing.length:  # the end of a piece of a server that is held
            self._queues[server.collector].appendleft(writing)
        else:
            order.open -= 1
            if not order.open:
                self._inbox.append(order)
                del self._orders[order.ticket]
        self._fill(server.collector)

    def _leave(self, writing: _Writing, keep: int) -> int:
        """Take it off its server with `keep` tokens; returns how many the server wrote."""
        server = writing.server
        assert server is not None, "what leaves was running"
        wrote = max(keep, self._written(writing)) - writing.done
        self._tokens += wrote
        writing.spans += self._spans(server, writing, keep)
        writing.done, writing.server = keep, None
        server.running.remove(writing)
        return wrote

    def _interrupt(self, writing: _Writing, *, keep: int, because: str) -> None:
        """Take it off its server, if it is at one; `keep`: tokens of its run that stay."""
        if writing.server is None:
            return
        wrote = self._leave(writing, writing.done + keep)
        self._wasted[because] += wrote - keep
        writing.runs += 1

    def _stop(self, server: _Server, because: str) -> None:
        server.awake = False
        open_writings = sorted(
            server.running, key=lambda writing: (writing.begun, writing.order.ticket.order.prompt.uid)
        )
        for writing in open_writings:
            wrote = self._written(writing) - writing.done
            keep = wrote // self.piece_tokens * self.piece_tokens if self.piece_tokens else 0
            self._interrupt(writing, keep=keep, because=because)
        self._queues[server.collector].extendleft(reversed(open_writings))
        self._fill(server.collector)

    def _written(self, writing: _Writing) -> int:
        """Its tokens up to now."""
        if writing.server is None:
            return writing.done
        new = int((self.now - writing.begun) * self.tokens_per_s + _ALMOST)
        return min(writing.stops, writing.done + new)

    def _spans(self, server: _Server, writing: _Writing, end: int) -> Iterator[tuple[int, int, int]]:
        """Versions of its tokens `done` to `end`, which this server wrote."""
        at = bisect_right(server.history, (writing.begun, math.inf)) - 1
        start = writing.done
        for place in range(at, len(server.history)):
            stop = end
            if place + 1 < len(server.history):
                new = int((server.history[place + 1][0] - writing.begun) * self.tokens_per_s + _ALMOST)
                stop = min(end, writing.done + new)
            if stop > start:
                yield server.history[place][1], start, stop
                start = stop

    def _group(self, order: _Order) -> list[Sample] | LostRollout:
        prompt = order.ticket.order.prompt
        if self._is_lost(prompt):
            return LostRollout(prompt, "lost in this simulation")
        count = len(order.writings) - order.greedy
        greedy = self._reward(prompt, count) if order.greedy else None
        return [
            Sample(prompt, (self._row(prompt, writing),), self._reward(prompt, writing.index), {}, greedy)
            for writing in order.writings[:count]
        ]

    def _row(self, prompt: Prompt, writing: _Writing) -> Row:
        """Tokens depend only on the seed, the prompt's uid and the index, as a server's do."""
        length, order = writing.length, writing.order
        reason = "length" if length == order.params.max_new_tokens else "stop"
        spans = tuple(VersionSpan(*span) for span in _joined(writing.spans))
        if not self._whole:
            turn = TurnSpan(0, 1, 1 + length)  # a row begins with context: here one token stands for the prompt
            return Row(range(1 + length), (turn,), range(length), spans, reason)  # type: ignore[arg-type]
        first = zlib.crc32(f"{order.params.sampling_seed}/{order.ticket.order.prompt.uid}/{writing.index}".encode())
        tokens = [6 + (first + 7 * at) % 89 for at in range(length)]
        log_probs = [-0.01 * (token % 50 + 1) for token in tokens]
        return Row.of(prompt.token_ids, Completion(tokens, log_probs, reason, spans))


def _joined(spans: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours of one version as one."""
    out: list[tuple[int, int, int]] = []
    for version, start, end in spans:
        if out and out[-1][0] == version:
            start = out.pop()[1]
        out.append((version, start, end))
    return out


class VirtualPrompts(Prompts):
    """An endless source of prompts over `rows` rows: visit 7 of 5 rows is row 2 of epoch 1, uid "1-2"."""

    def __init__(self, rows: int = 10**9) -> None:
        self.rows = rows

    def visit(self, number: int) -> Prompt:
        epoch, row = divmod(number, self.rows)
        return Prompt(f"{epoch}-{row}", [1, 2], "", "", extra={"visit": number})
