"""The driver's end of the rollout: hand over prompts, take scored groups, several batches under way if one likes.

The work is done by a child process (`collector`), so that writing, decoding and scoring go on while the driver trains.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
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
_WATCH_S = 1.0


class CollectorError(RuntimeError):
    """The collector failed, ended, or did not answer in time. One sentence, with the path of its log."""


class CollectorClient:
    """Example:

        collector = CollectorClient(urls=urls, token=token, tokenizer_path=path, make_scorer=partial(RewardPool,
        "gsm8k", 2),
                        timeout_s=120, log_path=run / "logs/collector.log")
        ticket = collector.submit(prompts, n=8, params=SamplingParams(max_new_tokens=256))
        groups = collector.next(ticket, timeout_s=600)     # one entry a prompt, in the order of the prompts
        collector.close()

    `make_scorer` is pickled into the child and called there. Start a CollectorClient from a thread that lives as long
    as it. With `fenced`, no server is asked before `trust` names it.
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
        context = multiprocessing.get_context("spawn")  # a fork would copy the driver's threads' locks
        self._pipe, theirs = context.Pipe()
        # not a daemon: those may not have children, and the reward's workers are children of the collector
        self._process = context.Process(target=run_collector, args=(theirs, settings), name="collector")
        self._process.start()
        theirs.close()
        self._prompts: dict[int, list[Prompt]] = {}
        self._groups: dict[int, dict[int, PackedGroup]] = {}
        self._num_tickets = 0
        # multiprocessing would wait for the child at exit, and the child for us
        atexit.register(self.close)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def submit(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams, greedy: bool = False) -> int:
        """Start writing n completions of every prompt; returns the ticket to ask `next` with.

        `greedy`: a further, greedy completion of each, whose reward every sample of the group then knows.
        """
        ticket, self._num_tickets = self._num_tickets, self._num_tickets + 1
        self._prompts[ticket] = list(prompts)
        self._groups[ticket] = {}
        self._send(Order(ticket, list(prompts), n, params, greedy))
        return ticket

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        """See rollout.trust."""
        self._send(Trust(url, version, adapter))

    def fence(self, url: str) -> None:
        """See rollout.trust."""
        self._send(Fence(url))

    def next(
        self,
        ticket: int,
        on_progress: Callable[[int, int], None] | None = None,
        timeout_s: float = 3600.0,
        watch: Callable[[], None] | None = None,
    ) -> list[list[Sample] | LostRollout]:
        """The groups of a ticket in the order of its prompts; waits for them, at most `timeout_s`.

        `on_progress(done, total)` is called as groups arrive, `watch()` then and at least every second. Raises
        CollectorError when the collector failed or ended, or when the time is over; KeyError for a ticket that was
        never given or is taken already.
        """
        prompts, groups = self._prompts[ticket], self._groups[ticket]
        deadline = time.monotonic() + timeout_s
        while len(groups) < len(prompts):
            if self._receive(min(deadline, time.monotonic() + _WATCH_S)):
                if on_progress is not None:
                    on_progress(len(groups), len(prompts))
            elif time.monotonic() >= deadline:
                raise CollectorError(
                    f"the collector finished {len(groups)} of {len(prompts)} prompts within {timeout_s:g} s; "
                    f"its log: {self._log_path}"
                )
            if watch is not None:
                watch()
        del self._prompts[ticket], self._groups[ticket]
        return [unpack(groups[index], prompt) for index, prompt in enumerate(prompts)]

    def close(self) -> None:
        """End the child, whatever it is doing."""
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
        """Take what the child sent, of any ticket; False when nothing came before the deadline."""
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
        if ticket in self._groups:
            self._groups[ticket][index] = group

    def _ended(self) -> CollectorError:
        self._process.join(_CLOSE_S)
        return CollectorError(
            f"the collector (pid {self._process.pid}) ended with exit code {self._process.exitcode}; "
            f"its log: {self._log_path}{last_lines(self._log_path)}"
        )
