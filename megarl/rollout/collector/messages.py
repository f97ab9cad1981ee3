"""The messages between the driver and a collector, which travel over a pipe in lists.

Driver to collector: `Message`.  Collector to driver: ("group", number, packed group, seconds that it waited only for
rewards), ("beat", counters), ("unfit", url, reason), ("left", url), ("first error", kind, sentence) once of each kind,
and at most once ("error", sentence).

A group is sent as plain tuples and without the tokens of its prompt, which the driver has: pickling is cheap then.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from megarl.rollout.protocol import SamplingParams
from megarl.rollout.server_states import ServerState
from megarl.samples.sample import LostRollout, Prompt, Row, Sample, TurnSpan, VersionSpan, without_prefix

PackedGroup = list[tuple[Any, ...]] | tuple[str, int]  # one tuple per sample, or what a LostRollout says


@dataclass(frozen=True)
class Order:
    """n completions of one prompt, and with `greedy` a greedy one more.  `urgent`: before orders that are not."""

    number: int
    prompt: Prompt
    n: int
    params: SamplingParams
    greedy: bool = False
    urgent: bool = False

    @property
    def num_completions(self) -> int:
        return self.n + self.greedy


@dataclass(frozen=True)
class Cancel:
    """The group of this order is no longer wanted."""

    number: int


@dataclass(frozen=True)
class Join:
    """One more server, fenced at first, and the number of completions that may run in addition."""

    url: str
    num_slots: int


@dataclass(frozen=True)
class Leave:
    """The server gets no more requests: what runs comes back, and then the collector sends "left"."""

    url: str
    num_slots: int


@dataclass(frozen=True)
class Close:
    """The collector must end."""


Message = Order | Cancel | ServerState | Join | Leave | Close


class Outbox:
    """Sends messages in a thread, in lists of all that wait: a full pipe blocks this thread, not the caller.

    `gather_s`: time to wait for more messages after the first one, unless `hurry` is called.
    `on_error`: called in this thread, at its end, if a message cannot be sent, for example pickled, although the other
    side is there.
    """

    def __init__(self, pipe: Connection, on_error: Callable[[Exception], None], *, gather_s: float = 0.0) -> None:
        self._pipe = pipe
        self._on_error = on_error
        self._gather_s = gather_s
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hurried = threading.Event()
        self._thread = threading.Thread(target=self._send_all, daemon=True, name="outbox")
        self._thread.start()

    def put(self, message: Any) -> None:
        self._waiting.put(message)

    def hurry(self) -> None:
        """Send what waits at once; if nothing waits, the next message."""
        self._hurried.set()

    def close(self) -> None:
        """The thread ends when all messages are sent, or when the other side is gone."""
        self._waiting.put(None)
        self.hurry()

    def join(self) -> None:
        self._thread.join()

    def _send_all(self) -> None:
        while True:
            messages = [self._waiting.get()]
            if self._gather_s:
                self._hurried.wait(self._gather_s)
                self._hurried.clear()
            while not self._waiting.empty():
                messages.append(self._waiting.get())
            try:
                self._pipe.send([message for message in messages if message is not None])
            except OSError:  # the other side is gone, which the reader of its messages notices too
                return
            except Exception as error:
                return self._on_error(error)
            if messages[-1] is None:
                return


def sentence(error: BaseException) -> str:
    """The content of an "error"."""
    return traceback.format_exception_only(error)[-1].strip()


def pack(group: list[Sample] | LostRollout) -> PackedGroup:
    if isinstance(group, LostRollout):
        return group.reason, group.unscored
    return [
        (
            tuple(_pack_row(row, sample.prompt.token_ids) for row in sample.rows),
            sample.reward,
            sample.reward_extra,
            sample.greedy_reward,
            sample.text,
            sample.truncated,
            sample.pred,
            sample.messages,
        )
        for sample in group
    ]


def unpack(packed: PackedGroup, prompt: Prompt) -> list[Sample] | LostRollout:
    """The group of `prompt`, as it was before `pack`."""
    if isinstance(packed, tuple):
        return LostRollout(prompt, *packed)
    return [Sample(prompt, tuple(_row(row, prompt.token_ids) for row in rows), *rest) for rows, *rest in packed]


def _pack_row(row: Row, prompt_ids: list[int]) -> tuple[Any, ...]:
    learnt = tuple((span.turn, span.start, span.end) for span in row.learnt)  # astuple copies, and takes much longer
    versions = tuple((span.version, span.start, span.end) for span in row.versions)
    tokens = without_prefix(row.token_ids, prompt_ids)
    return (*tokens, learnt, row.log_probs, versions, row.finish_reason, row.rewards, dict(row.columns))


def _row(packed: tuple[Any, ...], prompt_ids: list[int]) -> Row:
    num_shared, token_ids, learnt, log_probs, versions, *rest = packed
    turns = tuple(TurnSpan(*span) for span in learnt)
    return Row(prompt_ids[:num_shared] + token_ids, turns, log_probs, tuple(VersionSpan(*v) for v in versions), *rest)
