"""The driver's side of the rollout: submit prompts, take scored groups; several batches may be in flight.

A child process (`collector`) does the work, so that generation, decoding and scoring go on while the driver trains.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from megarl.processes.lifetime import last_lines
from megarl.rollout.collector import (
    CollectorSettings,
    Fence,
    Message,
    Order,
    PackedGroup,
    Scorer,
    Trust,
    run_collector,
    unpack,
)
from megarl.rollout.protocol import SamplingParams
from megarl.sample import LostRollout, Prompt, Sample

_CLOSE_S = 5.0


class CollectorError(RuntimeError):
    """The collector failed, ended, or did not finish in time. One sentence, with the path of its log."""


@dataclass
class _Awaited:
    """The prompts of a ticket, and its finished groups."""

    prompts: list[Prompt]
    groups: dict[int, PackedGroup] = field(default_factory=dict)  # by the index of the prompt
    awaited_since: float = 0.0  # time.monotonic() of the first call of `ready`; 0: not yet called

    @property
    def is_complete(self) -> bool:
        return len(self.groups) == len(self.prompts)


class CollectorClient:
    """Example:

        collector = CollectorClient(
            urls=urls, token=token, tokenizer_path=path, make_scorer=partial(RewardPool, "gsm8k", 2),
            timeout_s=120, log_path=run / "logs/collector.log")
        ticket = collector.submit(prompts, n=8, params=SamplingParams(max_new_tokens=256))
        while not collector.ready(ticket):
            ...                               # check the servers
        groups = collector.take(ticket)       # one entry per prompt, in the order of the prompts
        collector.close()

    `make_scorer` is pickled into the child and called there. Create a CollectorClient in a thread that lives as long
    as it. With `fenced`, a server gets no request before `trust` names it.
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
        max_in_flight: int = 512,
        fenced: bool = False,
    ) -> None:
        self._log_path = str(log_path)
        settings = CollectorSettings(
            tuple(urls), token, tokenizer_path, timeout_s, max_in_flight, fenced, make_scorer, self._log_path,
            os.getpid(),
        )  # fmt: skip
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that the driver's threads hold
        self._pipe, theirs = context.Pipe()
        # not a daemon: daemons may not have children, and the reward's workers are children of the collector
        self._process = context.Process(target=run_collector, args=(theirs, settings), name="collector")
        self._process.start()
        theirs.close()
        self._orders: dict[int, _Awaited] = {}  # by ticket
        self._num_tickets = 0
        # without this, at exit multiprocessing would wait for the child, and the child for this process
        atexit.register(self.close)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def submit(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams, greedy: bool = False) -> int:
        """Start the generation of n completions per prompt; returns the ticket for `ready` and `take`.

        `greedy`: generate one more, greedy completion per prompt; each sample of the group gets its reward.
        """
        ticket, self._num_tickets = self._num_tickets, self._num_tickets + 1
        self._orders[ticket] = _Awaited(list(prompts))
        self._send(Order(ticket, list(prompts), n, params, greedy))
        return ticket

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        """See rollout.trust."""
        self._send(Trust(url, version, adapter))

    def fence(self, url: str) -> None:
        """See rollout.trust."""
        self._send(Fence(url))

    def ready(self, ticket: int, timeout_s: float = 1.0, *, limit_s: float = 3600.0) -> bool:
        """Whether all groups of a ticket are here; waits up to `timeout_s` for a message about any ticket.

        Raises CollectorError if the collector failed or ended, or if groups are missing `limit_s` after the first
        call for this ticket; KeyError for an unknown ticket and for one that is already taken.
        """
        order = self._orders[ticket]
        order.awaited_since = order.awaited_since or time.monotonic()
        deadline = order.awaited_since + limit_s
        if order.is_complete or self._receive(min(deadline, time.monotonic() + timeout_s)):
            return order.is_complete
        if time.monotonic() >= deadline:
            done, total = self.progress(ticket)
            raise CollectorError(
                f"the collector finished {done} of {total} prompts within {limit_s:g} s; its log: {self._log_path}"
            )
        return False

    def progress(self, ticket: int) -> tuple[int, int]:
        """(finished groups, all groups) of a ticket."""
        order = self._orders[ticket]
        return len(order.groups), len(order.prompts)

    def take(self, ticket: int) -> list[list[Sample] | LostRollout]:
        """The groups of a ready ticket, in the order of its prompts."""
        order = self._orders.pop(ticket)
        assert order.is_complete, f"ticket {ticket} is not ready"
        return [unpack(order.groups[index], prompt) for index, prompt in enumerate(order.prompts)]

    def close(self) -> None:
        """End the child, by signals if it does not end by itself."""
        atexit.unregister(self.close)
        self._pipe.close()
        for end in (lambda: None, self._process.terminate, self._process.kill):
            end()
            self._process.join(_CLOSE_S)
            if not self._process.is_alive():
                return

    def _send(self, message: Message) -> None:
        try:
            self._pipe.send(message)
        except OSError:  # the child's end is closed: `_receive` knows why
            self._receive(time.monotonic())
            raise self._ended() from None

    def _receive(self, deadline: float) -> bool:
        """Receive the child's messages, of any ticket; False if none came before the deadline."""
        ready = wait([self._pipe, self._process.sentinel], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        if self._pipe not in ready and not self._pipe.poll():
            raise self._ended()
        try:
            messages = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        for message in messages:
            self._take(*message)
        return True

    def _take(self, kind: str, *content: Any) -> None:
        if kind == "error":
            raise CollectorError(f"the collector failed: {content[0]}; its log: {self._log_path}")
        ticket, index, group = content
        if ticket in self._orders:
            self._orders[ticket].groups[index] = group

    def _ended(self) -> CollectorError:
        self._process.join(_CLOSE_S)
        return CollectorError(
            f"the collector (pid {self._process.pid}) ended with exit code {self._process.exitcode}; "
            f"its log: {self._log_path}{last_lines(self._log_path)}"
        )
