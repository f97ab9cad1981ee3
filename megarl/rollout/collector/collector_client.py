"""The driver's side of the rollout: submit prompts, get scored groups; many may be in flight.

Child processes (`collector`) do the work, so that generation, decoding and scoring go on while the driver trains.  Each
has a share of the servers.  An order waits here until a collector with a live server has room for it.  A collector that
ends, or gives no sign of life, is started again and is given its open orders again: no order is lost, and each ticket
is filled once.
"""

from __future__ import annotations

import atexit
import heapq
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from megarl.processes.presence import show_life
from megarl.rollout.collect import Completions, MakeWriter
from megarl.rollout.collector.collector import CollectorSettings, Scorer
from megarl.rollout.collector.collector_process import CollectorProcess
from megarl.rollout.collector.collector_share import CollectorError, OpenOrder, Share, Ticket, added
from megarl.rollout.collector.messages import Fence, Hold, Order, PackedGroup, Trust, unpack
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.wire_columns import EngineColumn
from megarl.sample import Prompt

__all__ = ["CollectorError", "Collectors", "Ticket"]

_LOOK_S = 1.0


class Collectors:
    """Example:

        collectors = Collectors(
            urls=urls, token=token, tokenizer_path=path, make_scorer=partial(Rewards, ["gsm8k"]),
            timeout_s=120, log_path=run / "logs/collector.log")
        tickets = collectors.submit(prompts, n=8, params=SamplingParams(max_new_tokens=256))
        while any(ticket.group is None for ticket in tickets):
            collectors.wait()                 # and check the servers
        collectors.close()

    Create it, and call `wait`, in a thread that lives as long as it: see `lifetime`.

    Args:
        make_scorer, make_writer: pickled into each collector and called there.
        timeout_s: of one request; a piece that takes longer is cut short and goes on.  An answer has no time limit.
        log_path: of several collectors, number i writes to <stem>_<i><suffix>.
        num_collectors: as many as servers at most.
        max_in_flight: completions that a collector requests at a time.
        piece_tokens: new tokens of one request at most; 0: no limit.
        fenced: a server gets no request before `trust` names it.
        salted: the servers know salts of their prefix caches (Abilities.cache_salt), and keep KV in a push.
        dp_ranks: data-parallel ranks of each server, each with a prefix cache of its own.
        joins: short answers that are asked for at once travel in one request.
        columns: what is to travel with the tokens of every completion.
        num_ids: of the model's vocabulary; None: not known.
        joined_slots: completions at a time that each server brings which joins later.
        reports_unfit: a server that hangs, or fails again and again, gets no request before the next `trust`, and
            `take_unfit` names it.
        slow_factor: so does one whose replies take so many times as long as those of others; None: none does.
        heartbeat_s: a collector that says nothing for so long is killed and started again.
        max_restarts: of a collector within ten minutes.
        warn: gets a sentence about each restart, and about the first sample without a reward, or without an audit.
        move_after_s: the orders of a collector go to others if it has had no live server for so long.
    """

    def __init__(
        self,
        *,
        urls: Sequence[str],
        token: str,
        tokenizer_path: str,
        make_scorer: Callable[[], Scorer],
        timeout_s: float,
        log_path: str | Path,
        num_collectors: int = 1,
        max_in_flight: int = 512,
        make_writer: MakeWriter = Completions,
        piece_tokens: int = 0,
        fenced: bool = False,
        salted: bool = False,
        dp_ranks: int = 1,
        joins: bool = False,
        columns: Sequence[EngineColumn] = (),
        num_ids: int | None = None,
        joined_slots: int = 0,
        reports_unfit: bool = False,
        slow_factor: float | None = None,
        heartbeat_s: float = 60.0,
        max_restarts: int = 3,
        warn: Callable[[str], None] = lambda sentence: None,
        move_after_s: float = 10.0,
    ) -> None:
        num = min(len(urls), num_collectors)
        self._heartbeat_s, self._move_after_s = heartbeat_s, move_after_s
        self._joined_slots = joined_slots
        self._news = threading.Condition()  # its lock guards all that follows
        self._open: dict[int, OpenOrder] = {}  # by number
        # A heap of (not urgent, number) of the orders that no collector has; cancelled ones stay in it.
        self._waiting: list[tuple[bool, int]] = []
        self._came: list[tuple[Ticket, PackedGroup]] = []  # tickets that `wait` will fill
        self._numbers = count()
        self._error: CollectorError | None = None
        self._warn = warn
        self._reward_errors: dict[str, str] = {}  # by kind, the first one, of which `wait` warns
        self._warned: set[str] = set()  # kinds
        self._unfit: dict[str, str] = {}  # url -> reason
        self._shares: list[Share] = []
        with self._news:
            for index in range(num):
                settings = CollectorSettings(
                    urls=tuple(urls[index::num]),
                    token=token,
                    tokenizer_path=tokenizer_path,
                    timeout_s=timeout_s,
                    max_in_flight=max_in_flight,
                    piece_tokens=piece_tokens,
                    fenced=fenced,
                    salted=salted,
                    dp_ranks=dp_ranks,
                    joins=joins,
                    columns=tuple(columns),
                    num_ids=num_ids,
                    reports_unfit=reports_unfit,
                    slow_factor=slow_factor,
                    make_scorer=make_scorer,
                    make_writer=make_writer,
                    log_path=str(_numbered(Path(log_path), index, num)),
                    parent_pid=os.getpid(),
                )
                self._shares.append(Share(settings, partial(self._hear, index), max_restarts, warn))
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
        """Start the generation of n completions per prompt; returns a ticket for each prompt.

        `greedy`: generate one more, greedy completion per prompt; each sample of the group gets its reward.
        `urgent`: before all orders that are not, but for the completions that have begun.
        """
        tickets = [Ticket(prompt) for prompt in prompts]
        with self._news:
            for ticket in tickets:
                ticket.number = next(self._numbers)
                order = Order(ticket.number, ticket.prompt, n, params, greedy, urgent)
                self._open[order.number] = OpenOrder(order, ticket)
                self._queue(order)
            self._assign()
        return tickets

    def wait(self, timeout_s: float = 1.0) -> bool:
        """Fill the tickets of all groups that came, and start collectors again that ended.

        Waits up to `timeout_s` for a group; False if none came.  Raises CollectorError if a collector reports an error,
        or ends too often.
        """
        show_life()
        deadline = time.monotonic() + timeout_s
        with self._news:
            self._look()
            while not self._came and (left := deadline - time.monotonic()) > 0:
                self._news.wait(min(left, _LOOK_S))
                self._look()
            came, self._came = self._came, []
        for ticket, packed in came:
            assert ticket.group is None, f"order {ticket.number} was filled twice"
            ticket.group = unpack(packed, ticket.prompt)
        return bool(came)

    def cancel(self, tickets: Iterable[Ticket]) -> None:
        """Nobody wants these groups any more: tickets that are not filled stay so."""
        with self._news:
            unwanted = {ticket.number for ticket in tickets}
            for number in unwanted & self._open.keys():
                opened = self._open.pop(number)
                if opened.share is not None:
                    opened.share.cancel(opened)
            self._came = [(ticket, packed) for ticket, packed in self._came if ticket.number not in unwanted]
            self._assign()

    # ---- servers

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        """See rollout.trust."""
        with self._news:
            self._share_of[url].trust(Trust(url, version, adapter))
            self._assign()

    def fence(self, url: str) -> None:
        """See rollout.trust."""
        with self._news:
            self._share_of[url].fence(Fence(url))

    def hold(self, url: str) -> None:
        """See rollout.trust."""
        with self._news:
            self._share_of[url].hold(Hold(url))

    def join(self, url: str) -> None:
        """One more server; it gets no requests before `trust`."""
        with self._news:
            share = min(self._shares, key=lambda share: len(share.urls))
            share.join(url, self._joined_slots)
            self._share_of[url] = share

    def leave(self, url: str) -> None:
        """Send a server no more requests; what runs there comes back and goes on elsewhere: see `has_left`."""
        with self._news:
            self._share_of.pop(url).leave(url, self._joined_slots)

    def has_left(self, url: str) -> bool:
        """Whether nothing of this server is awaited any more."""
        with self._news:
            return url not in self._share_of and not any(url in share.leaving for share in self._shares)

    def take_unfit(self) -> dict[str, str]:
        """url -> why, of the servers that were found unfit since the last call: their owner starts them again."""
        with self._news:
            unfit, self._unfit = self._unfit, {}
            return unfit

    # ---- counters, the end

    @property
    def counters(self) -> dict[str, float]:
        """Those of EnginePool.counters summed over the collectors, about a second old; and

        orders: open ones; orders_waiting: of these, those that no collector has; restarts: of collectors, in total.
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
            share.process.ask_to_end()
        for share in self._shares:
            share.process.end()
        with self._news:
            self._warn_of_rewards()  # nobody may have waited since it came

    # ---- what the threads of the collectors call, and `wait`

    def _hear(self, index: int, process: CollectorProcess, messages: list[tuple[Any, ...]]) -> None:
        with self._news:
            share = self._shares[index]
            for kind, *content in messages:
                if kind == "group":
                    self._finish(process, *content)
                elif kind == "left":
                    share.leaving.discard(content[0])
                elif kind == "reward error":
                    more = f"more errors are in {process.log_path}"
                    self._reward_errors.setdefault(content[0], f"{content[1]}; {more}")
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
        opened = self._open.pop(number, None)
        if opened is None:  # cancelled, or another collector was faster
            return
        if opened.share is not None and opened.share.process is not process:  # it was moved meanwhile
            opened.share.cancel(opened)
        elif opened.share is not None:
            opened.share.settle(opened)
        opened.ticket.came_at = time.monotonic()
        opened.ticket.written_at = opened.ticket.came_at - scoring_s
        self._came.append((opened.ticket, packed))

    def _queue(self, order: Order) -> None:
        heapq.heappush(self._waiting, (not order.urgent, order.number))

    def _assign(self) -> None:
        """Give waiting orders, lowest numbers first, to collectors with the fewest completions per live server.

        Urgent ones need no room: in the collector they pass what waits there.
        """
        while self._waiting:
            can_wait, number = self._waiting[0]
            free = [share for share in self._shares if share.live and not (can_wait and share.load >= share.room)]
            if not free:
                return
            heapq.heappop(self._waiting)
            opened = self._open.get(number)
            if opened is not None:
                min(free, key=lambda share: share.load / len(share.live)).give(opened)

    def _warn_of_rewards(self) -> None:
        for kind in self._reward_errors.keys() - self._warned:
            self._warned.add(kind)
            self._warn(self._reward_errors[kind])

    def _look(self) -> None:
        if self._error is not None:
            raise self._error
        self._warn_of_rewards()
        for share in self._shares:
            share.look(self._heartbeat_s)
        now = time.monotonic()
        if any(share.live for share in self._shares):
            for share in self._shares:
                if not share.live and now - share.dead_since >= self._move_after_s:
                    self._take_back(share)
            self._assign()

    def _take_back(self, share: Share) -> None:
        for opened in list(share.orders.values()):
            share.cancel(opened)
            self._queue(opened.order)


def _numbered(path: Path, index: int, num: int) -> Path:
    return path if num == 1 else path.with_stem(f"{path.stem}_{index}")
