"""A collector's share of the servers: what is known of them, its open orders, and how it is started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.rollout.collector.collector import CollectorSettings
from megarl.rollout.collector.collector_process import CollectorProcess
from megarl.rollout.collector.messages import Cancel, Fence, Hold, Join, Leave, Message, Order, Trust
from megarl.sample import LostRollout, Prompt, Sample

GAUGES = ("in_flight",)  # of a collector's counters; the others are totals
_RESTARTS_WITHIN_S = 600.0


class CollectorError(RuntimeError):
    """A collector failed, or ended too often. One sentence, with the path of its log."""


@dataclass(eq=False)
class Ticket:
    """A submitted prompt; `Collectors.wait` fills in its group."""

    prompt: Prompt
    group: list[Sample] | LostRollout | None = None  # None: not finished
    number: int = -1  # of its order
    written_at: float = 0.0  # time.monotonic() when all was generated; 0: not known
    came_at: float = 0.0  # when the group with its rewards came


@dataclass(eq=False)
class OpenOrder:
    """An order without an answer."""

    order: Order
    ticket: Ticket
    share: Share | None = None  # whose collector has it; None: it waits for one


def added(counters: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums by name."""
    out: dict[str, float] = {}
    for some in counters:
        for name, value in some.items():
            out[name] = out.get(name, 0.0) + value
    return out


class Share:
    """Not locked: `Collectors`, which owns the shares, has one lock for all of them.

    `on_messages`: see CollectorProcess; called in a thread.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        on_messages: Callable[[CollectorProcess, list[tuple[Any, ...]]], None],
        max_restarts: int,
        on_restart: Callable[[str], None],
    ) -> None:
        self._settings, self._on_messages = settings, on_messages
        self._max_restarts, self._on_restart = max_restarts, on_restart
        self.live = set() if settings.fenced else set(settings.urls)  # servers that generate
        self.dead_since = time.monotonic()  # when the last live one was fenced
        self._words: dict[str, list[Message]] = {url: [] for url in settings.urls}  # what a new collector has to know
        self.leaving: set[str] = set()  # servers of which the collector may still have requests
        self.orders: dict[int, OpenOrder] = {}  # by number
        self.load = 0  # their completions
        self.process = CollectorProcess(settings, on_messages)
        self.has_ended = False
        self.counters: dict[str, float] = {}  # as the collector last said
        self._before: dict[str, float] = {}  # totals of the collectors before it
        self._restarted: deque[float] = deque()  # time.monotonic() of the last restarts
        self.num_restarts = 0

    @property
    def urls(self) -> tuple[str, ...]:
        return self._settings.urls

    @property
    def totals(self) -> dict[str, float]:
        """Counters of all its collectors so far, and the gauges of the current one."""
        return added([self._before, self.counters])

    # ---- servers

    def trust(self, word: Trust) -> None:
        # Older versions need not be known: when a new collector sends its first request, the server has this one.
        self._words[word.url] = [word]
        self.live.add(word.url)
        self.process.put(word)

    def fence(self, word: Fence) -> None:
        self._words[word.url] = [word]
        if self.live == {word.url}:
            self.dead_since = time.monotonic()
        self.live.discard(word.url)
        self.process.put(word)

    def hold(self, word: Hold) -> None:
        self._words[word.url].append(word)
        self.process.put(word)

    def join(self, url: str, num_slots: int) -> None:
        """One more server, which is not live yet."""
        self._change((*self.urls, url), num_slots)
        self._words[url] = []
        self.process.put(Join(url, num_slots))

    def leave(self, url: str, num_slots: int) -> None:
        """The collector reports when it has nothing of this server any more."""
        self._change(tuple(other for other in self.urls if other != url), -num_slots)
        del self._words[url]
        if self.live == {url}:
            self.dead_since = time.monotonic()
        self.live.discard(url)
        self.leaving.add(url)
        self.process.put(Leave(url, num_slots))

    def _change(self, urls: tuple[str, ...], num_slots: int) -> None:
        most = self._settings.max_in_flight + num_slots
        self._settings = replace(self._settings, urls=urls, max_in_flight=most)

    @property
    def room(self) -> int:
        """Completions that the collector may have: half of them wait there, so that no slot waits."""
        return 2 * self._settings.max_in_flight

    # ---- orders

    def give(self, opened: OpenOrder) -> None:
        opened.share, self.orders[opened.order.number] = self, opened
        self.load += opened.order.num_completions
        self.process.put(opened.order)

    def cancel(self, opened: OpenOrder) -> None:
        self.process.put(Cancel(opened.order.number))
        self.settle(opened)

    def settle(self, opened: OpenOrder) -> None:
        """The order is no longer open here."""
        opened.share = None
        del self.orders[opened.order.number]
        self.load -= opened.order.num_completions

    # ---- the process

    def look(self, heartbeat_s: float) -> None:
        """Start the collector again if it has ended or is silent.  Raises CollectorError if it did so too often."""
        if self.has_ended:
            reason = self.process.how_it_ended()
        elif self.process.is_silent(heartbeat_s):
            reason = f"the collector (pid {self.process.pid}) gave no sign of life; its log: {self._settings.log_path}"
        else:
            return
        self.process.kill()
        now = time.monotonic()
        while self._restarted and self._restarted[0] < now - _RESTARTS_WITHIN_S:
            self._restarted.popleft()
        if len(self._restarted) >= self._max_restarts:
            raise CollectorError(f"after {len(self._restarted)} restarts within ten minutes, {reason}")
        self._restarted.append(now)
        self._start_again()
        taken = f"another one (pid {self.process.pid}) has its {len(self.orders)} open orders"
        self._on_restart(f"{reason.splitlines()[0]}; {taken}")

    def _start_again(self) -> None:
        self.num_restarts += 1
        self._before = {name: value for name, value in self.totals.items() if name not in GAUGES}
        self.counters = {}
        self.process = CollectorProcess(self._settings, self._on_messages)
        self.has_ended = False
        self.leaving.clear()  # the new one knows nothing of them
        for words in self._words.values():
            for word in words:
                self.process.put(word)
        for number in sorted(self.orders):
            self.process.put(self.orders[number].order)
