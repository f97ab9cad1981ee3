"""A collector as the driver sees it: its process, its share of the servers, its open orders, how it starts again."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.processes.child import start_child
from megarl.processes.lifetime import MemoryEnd, last_lines
from megarl.processes.restarts import Restarts
from megarl.rollout.collector.collector import CollectorSettings, run_collector
from megarl.rollout.collector.messages import Cancel, Join, Leave, Message, Order, Outbox, sentence
from megarl.rollout.server_states import Phase, ServerState
from megarl.samples.sample import LostRollout, Prompt, Sample

GAUGES = ("in_flight",)  # of a collector's counters; the others are totals
_CLOSE_S = 5.0
_SETTLED_S = 200.0  # a collector that lived for so long may be restarted anew
_START_S = 600.0  # until the first sign of life: imports, tokenizer, reward workers
_DOUBT_S = 2.0  # a silent collector is looked at again after this time: perhaps this process was stopped, too


class CollectorError(RuntimeError):
    """A collector failed, or ended too often. One sentence, with the path of its log."""


@dataclass(eq=False)
class Ticket:
    """A submitted order; `Collectors.wait` fills in its group."""

    order: Order
    group: list[Sample] | LostRollout | None = None  # None: not finished
    generated_at: float = 0.0  # time.monotonic() when all was generated; 0: not known
    came_at: float = 0.0  # when the group with its rewards came
    share: Share | None = None  # whose collector has the order; None: none has it

    @property
    def prompt(self) -> Prompt:
        return self.order.prompt


def added(counters: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums by name."""
    sums: defaultdict[str, float] = defaultdict(float)
    for some in counters:
        for name, value in some.items():
            sums[name] += value
    return sums


class CollectorProcess:
    """A started collector, with a thread for each direction of its pipe, so that it never blocks the driver.

    Create it in a thread that lives as long as it: see `lifetime`.  `on_messages(process, messages)` is called in a
    thread; an empty list is the last one: the collector has ended.
    """

    def __init__(
        self, settings: CollectorSettings, on_messages: Callable[[CollectorProcess, list[tuple[Any, ...]]], None]
    ) -> None:
        self.log_path = settings.log_path
        self._on_messages = on_messages
        self._memory = MemoryEnd()
        self._process, self._pipe = start_child(run_collector, settings)
        self._started = self._heard = time.monotonic()
        self._has_begun = False
        self._doubted = 0.0  # time.monotonic() when it was first found silent; 0: it is not
        self._outbox = Outbox(self._pipe, self._fail)
        threading.Thread(target=self._read_all, daemon=True, name="collector's messages").start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lived_s(self) -> float:
        """Seconds from its start to its last sign of life."""
        return self._heard - self._started

    def put(self, message: Message) -> None:
        """Send a message, without waiting; it is lost if the collector has ended."""
        self._outbox.put(message)

    def is_silent(self, limit_s: float) -> bool:
        """Whether nothing came from it for `limit_s`, or for ten minutes after its start."""
        now = time.monotonic()
        if now - self._heard <= (limit_s if self._has_begun else _START_S):
            self._doubted = 0.0
            return False
        self._doubted = self._doubted or now
        return now - self._doubted > _DOUBT_S

    def end(self) -> None:
        """End it after `Close`, by SIGKILL if it does not end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self._outbox.close()  # the pipe is closed with the last thread that uses it

    def how_it_ended(self) -> str:
        """A sentence, and the end of its log; for a collector that has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        code = self._process.returncode
        log = f"{self.log_path}{last_lines(self.log_path)}{self._memory.words(code)}"
        return f"the collector (pid {self.pid}) ended with exit code {code}; its log: {log}"

    def _fail(self, error: Exception) -> None:
        """Report that a message cannot be sent or read, at which a new collector would fail too."""
        self._on_messages(self, [("error", sentence(error))])

    def _read_all(self) -> None:
        try:
            while True:
                messages = self._pipe.recv()
                self._heard, self._has_begun = time.monotonic(), True
                if messages:
                    self._on_messages(self, messages)
        except (EOFError, OSError):  # it has ended, perhaps in the middle of a message
            self._on_messages(self, [])
        except Exception as error:
            self._fail(error)


class Share:
    """The servers and orders of one collector.  Not locked: `Collectors` has one lock for all shares."""

    def __init__(
        self,
        settings: CollectorSettings,
        on_messages: Callable[[CollectorProcess, list[tuple[Any, ...]]], None],
        max_restarts: int,
        on_restart: Callable[[str], None],
    ) -> None:
        self._settings, self._on_messages = settings, on_messages
        self._restarts, self._on_restart = Restarts(max_restarts, settled_after_s=_SETTLED_S), on_restart
        at_first = Phase.FENCED if settings.generation.fenced else Phase.GENERATING
        self._states = {url: ServerState(url, at_first) for url in settings.urls}  # a new collector has to know them
        self.dead_since = time.monotonic()  # when the last live one was fenced
        self.leaving: set[str] = set()  # servers of which the collector may still have requests
        self.orders: dict[int, Ticket] = {}  # that are open, by number
        self.load = 0  # their completions
        self.process = CollectorProcess(settings, on_messages)
        self.has_ended = False
        self.counters: dict[str, float] = {}  # as the collector last said
        self._before: dict[str, float] = {}  # totals of the collectors before it
        self.num_restarts = 0  # in total

    @property
    def urls(self) -> tuple[str, ...]:
        return self._settings.urls

    @property
    def totals(self) -> dict[str, float]:
        """Counters of all its collectors so far, and the gauges of the current one."""
        return added([self._before, self.counters])

    # ---- servers

    @property
    def live(self) -> list[str]:
        """Servers that are not fenced."""
        return [url for url, state in self._states.items() if state.phase is not Phase.FENCED]

    def update(self, state: ServerState) -> None:
        self._set(state)
        self.process.put(state)

    def _set(self, state: ServerState) -> None:
        if state.phase is Phase.FENCED and self.live == [state.url]:
            self.dead_since = time.monotonic()
        self._states[state.url] = state

    def join(self, url: str, num_slots: int) -> None:
        """One more server, which is not live yet."""
        self._change((*self.urls, url), num_slots)
        self._set(ServerState(url, Phase.FENCED))
        self.process.put(Join(url, num_slots))

    def leave(self, url: str, num_slots: int) -> None:
        """Send a server no more requests; the collector reports when none of them runs any longer."""
        self._change(tuple(other for other in self.urls if other != url), -num_slots)
        self._set(ServerState(url, Phase.FENCED))
        del self._states[url]
        self.leaving.add(url)
        self.process.put(Leave(url, num_slots))

    def _change(self, urls: tuple[str, ...], num_slots: int) -> None:
        generation = self._settings.generation
        more = replace(generation, max_in_flight=generation.max_in_flight + num_slots)
        self._settings = replace(self._settings, urls=urls, generation=more)

    @property
    def room(self) -> int:
        """Completions that the collector may have: half of them wait there, so that no slot waits."""
        return 2 * self._settings.generation.max_in_flight

    # ---- orders

    def give(self, ticket: Ticket) -> None:
        ticket.share, self.orders[ticket.order.number] = self, ticket
        self.load += ticket.order.num_completions
        self.process.put(ticket.order)

    def cancel(self, ticket: Ticket) -> None:
        self.process.put(Cancel(ticket.order.number))
        self.settle(ticket)

    def settle(self, ticket: Ticket) -> None:
        """The order is no longer open here."""
        ticket.share = None
        del self.orders[ticket.order.number]
        self.load -= ticket.order.num_completions

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
        self._restarts.note_run(self.process.lived_s)
        if self._restarts.are_used_up:
            raise CollectorError(f"after {self._restarts.count} restarts, {reason}")
        self._restarts.count += 1
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
        # Older versions need not be known: when a new collector sends its first request, the server has this one.
        for state in self._states.values():
            self.process.put(state)
        for number in sorted(self.orders):
            self.process.put(self.orders[number].order)
