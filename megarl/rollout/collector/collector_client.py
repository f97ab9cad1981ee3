"""The driver's side of the rollout: submit prompts, get scored groups, while the driver trains.

Child processes (`collector`) do the work, each with a share of the servers.  An order waits here until a collector with
a live server has room for it.  A collector that ends, or is silent, is started again and gets its open orders again: no
order is lost, and each ticket is filled once.
"""

from __future__ import annotations

import atexit
import heapq
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from megarl.processes import watchdog
from megarl.rollout.collector.collector import CollectorSettings
from megarl.rollout.collector.collector_share import CollectorError, CollectorProcess, Share, Ticket, added
from megarl.rollout.collector.messages import Close, Order, PackedGroup, unpack
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.server_states import ServerState
from megarl.samples.sample import Prompt

__all__ = ["CollectorError", "Collectors", "Ticket"]

_LOOK_S = 1.0


class Collectors:
    """Example:

        scorer, log = partial(Rewards, ["gsm8k"]), run / "logs/collector.log"
        collectors = Collectors(CollectorSettings(urls, token, path, GenerationSettings(timeout_s=120), scorer, log))
        tickets = collectors.submit(prompts, n=8, params=SamplingParams(max_new_tokens=256))
        while any(ticket.group is None for ticket in tickets):
            collectors.wait()                 # and check the servers
        collectors.close()

    Create it, and call `wait`, in a thread that lives as long as it: see `lifetime`.

    Args:
        num_collectors: at most as many as servers.
        joined_slots: completions at a time that each server adds which joins later.
        heartbeat_s: a collector that is silent for so long is restarted.
        max_restarts: of a collector that each time lives for less than 200 s.
        warn: gets a sentence for each restart, and for the first of each kind of fault that ends no run.
        move_after_s: after so long without a live server the orders of a collector go to others.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        *,
        num_collectors: int = 1,
        joined_slots: int = 0,
        heartbeat_s: float = 60.0,
        max_restarts: int = 3,
        warn: Callable[[str], None] = lambda sentence: None,
        move_after_s: float = 10.0,
    ) -> None:
        num = min(len(settings.urls), num_collectors)
        self._heartbeat_s, self._move_after_s = heartbeat_s, move_after_s
        self._joined_slots = joined_slots
        self._news = threading.Condition()  # its lock guards all that follows
        self._open: dict[int, Ticket] = {}  # by the number of their orders
        # A heap of (not urgent, number) of the orders that no collector has; cancelled ones stay in it.
        self._waiting: list[tuple[bool, int]] = []
        self._came: list[tuple[Ticket, PackedGroup]] = []  # tickets that `wait` will fill
        self._numbers = count()
        self._error: CollectorError | None = None
        self._warn = warn
        self._first_errors: set[str] = set()  # their kinds
        self._warnings: list[str] = []  # that `wait` gives to `warn`
        self._unfit: dict[str, str] = {}  # url -> reason
        self._shares: list[Share] = []
        with self._news:
            for index in range(num):
                log_path = _numbered(settings.log_path, index, num)
                own = replace(settings, urls=settings.urls[index::num], log_path=log_path)
                self._shares.append(Share(own, partial(self._hear, index), max_restarts, warn))
        self._share_of = {url: share for share in self._shares for url in share.urls}
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        return [share.process.pid for share in self._shares]

    # ---- orders

    def submit(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int,
        params: SamplingParams,
        greedy: bool = False,
        urgent: bool = False,
    ) -> list[Ticket]:
        """Order n completions per prompt; returns a ticket for each prompt.

        `greedy`: also a greedy completion per prompt, whose reward each sample of the group gets.  `urgent`: before all
        orders that are not, except for completions that have begun.
        """
        with self._news:
            orders = [Order(next(self._numbers), prompt, n, params, greedy, urgent) for prompt in prompts]
            tickets = [Ticket(order) for order in orders]
            for ticket in tickets:
                self._open[ticket.order.number] = ticket
                self._queue(ticket.order)
            self._assign()
        return tickets

    def wait(self, timeout_s: float = 1.0) -> bool:
        """Fill the tickets of all groups that came, and restart collectors that ended.

        Waits up to `timeout_s` for a group; returns whether one came.  Raises CollectorError if a collector reports an
        error, or ends too often.
        """
        watchdog.heartbeat()
        deadline = time.monotonic() + timeout_s
        with self._news:
            self._look()
            while not self._came and (left := deadline - time.monotonic()) > 0:
                self._news.wait(min(left, _LOOK_S))
                self._look()
            came, self._came = self._came, []
        for ticket, packed in came:
            assert ticket.group is None, f"order {ticket.order.number} was filled twice"
            ticket.group = unpack(packed, ticket.prompt)
        return bool(came)

    def cancel(self, tickets: Iterable[Ticket]) -> None:
        """Stop the work for these tickets; those that are not filled stay so."""
        with self._news:
            unwanted = {ticket.order.number for ticket in tickets}
            for number in unwanted & self._open.keys():
                ticket = self._open.pop(number)
                if ticket.share is not None:
                    ticket.share.cancel(ticket)
            self._came = [(ticket, packed) for ticket, packed in self._came if ticket.order.number not in unwanted]
            self._assign()

    # ---- servers

    def update(self, state: ServerState) -> None:
        """Send the new state of a server to its collector."""
        with self._news:
            self._share_of[state.url].update(state)
            self._assign()

    def join(self, url: str) -> None:
        """One more server; it is fenced at first."""
        with self._news:
            share = min(self._shares, key=lambda share: len(share.urls))
            share.join(url, self._joined_slots)
            self._share_of[url] = share

    def leave(self, url: str) -> None:
        """Send a server no more requests; other servers continue what runs there: see `has_left`."""
        with self._news:
            self._share_of.pop(url).leave(url, self._joined_slots)

    def has_left(self, url: str) -> bool:
        """Whether nothing of this server is outstanding."""
        with self._news:
            return url not in self._share_of and not any(url in share.leaving for share in self._shares)

    def take_unfit(self) -> dict[str, str]:
        """url -> reason, of the servers that were found unfit since the last call."""
        with self._news:
            unfit, self._unfit = self._unfit, {}
            return unfit

    # ---- counters, the end

    @property
    def counters(self) -> dict[str, float]:
        """The sums of EnginePool.counters, about a second old, and three more.

        `orders`: open ones; `orders_waiting`: those that no collector has yet; `restarts`: of collectors, in total.
        """
        with self._news:
            with_collector = sum(len(share.orders) for share in self._shares)
            return {
                **added(share.totals for share in self._shares),
                "orders": float(len(self._open)),
                "orders_waiting": float(len(self._open) - with_collector),
                "restarts": float(sum(share.num_restarts for share in self._shares)),
            }

    def close(self) -> None:
        """End the collectors, by signals if they do not end by themselves."""
        atexit.unregister(self.close)
        for share in self._shares:
            share.process.put(Close())
        for share in self._shares:
            share.process.end()
        with self._news:
            self._say_warnings()

    # ---- what the threads of the collectors call, and `wait`

    def _hear(self, index: int, process: CollectorProcess, messages: list[tuple[Any, ...]]) -> None:
        with self._news:
            share = self._shares[index]
            for kind, *content in messages:
                if kind == "group":
                    self._finish(process, *content)
                elif kind == "left":
                    share.leaving.discard(content[0])
                elif kind == "first error":
                    if content[0] not in self._first_errors:
                        self._first_errors.add(content[0])
                        self._warnings.append(f"{content[1]}; more errors are in {process.log_path}")
                elif kind == "unfit":
                    self._unfit[content[0]] = content[1]
                elif kind == "beat":
                    share.counters = content[0] if process is share.process else share.counters
                else:
                    self._error = CollectorError(f"the collector failed: {content[0]}; its log: {process.log_path}")
            share.has_ended |= not messages and process is share.process
            self._assign()
            self._news.notify_all()

    def _finish(self, process: CollectorProcess, number: int, packed: PackedGroup, scoring_s: float) -> None:
        ticket = self._open.pop(number, None)
        if ticket is None:  # cancelled, or another collector was faster
            return
        if ticket.share is not None and ticket.share.process is not process:  # it was moved meanwhile
            ticket.share.cancel(ticket)
        elif ticket.share is not None:
            ticket.share.settle(ticket)
        ticket.came_at = time.monotonic()
        ticket.generated_at = ticket.came_at - scoring_s
        self._came.append((ticket, packed))

    def _queue(self, order: Order) -> None:
        heapq.heappush(self._waiting, (not order.urgent, order.number))

    def _assign(self) -> None:
        """Give waiting orders, lowest numbers first, to collectors with the fewest completions per live server.

        Urgent ones need no room: in the collector they overtake what waits there.
        """
        while self._waiting:
            can_wait, number = self._waiting[0]
            free = [share for share in self._shares if share.live and not (can_wait and share.load >= share.room)]
            if not free:
                return
            heapq.heappop(self._waiting)
            ticket = self._open.get(number)
            if ticket is not None:
                min(free, key=lambda share: share.load / len(share.live)).give(ticket)

    def _say_warnings(self) -> None:
        while self._warnings:
            self._warn(self._warnings.pop(0))

    def _look(self) -> None:
        if self._error is not None:
            raise self._error
        self._say_warnings()
        for share in self._shares:
            share.look(self._heartbeat_s)
        now = time.monotonic()
        if any(share.live for share in self._shares):
            for share in self._shares:
                if not share.live and now - share.dead_since >= self._move_after_s:
                    self._take_back(share)
            self._assign()

    def _take_back(self, share: Share) -> None:
        for ticket in list(share.orders.values()):
            share.cancel(ticket)
            self._queue(ticket.order)


def _numbered(path: Path, index: int, num: int) -> Path:
    return path if num == 1 else path.with_stem(f"{path.stem}_{index}")
