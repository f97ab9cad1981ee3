"""What the driver and a collector say to each other over a pipe, in lists of messages.

Driver to collector: `Order`, `Cancel`, `Trust`, `Fence`, `Hold`, `Join`, `Leave`, `Close`.
Collector to driver: ("group", number, packed group, seconds that it waited only for rewards), ("beat", counters),
("unfit", url, reason), ("left", url), and at most once ("error", sentence), and of each kind ("reward error", kind,
sentence).
A group is sent as plain tuples and without its prompt, which the driver still has, to make pickling cheap: rows that
begin with the prompt's tokens are sent without them.
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
from megarl.sample import LostRollout, Prompt, Row, Sample, TurnSpan, VersionSpan, without_prefix

PackedGroup = list[tuple[Any, ...]] | tuple[str, int]  # one tuple per sample, or what a LostRollout says


@dataclass(frozen=True)
class Order:
    """n completions of one prompt, and with `greedy` one more, greedy completion.

    `urgent`: somebody waits for nothing else, so it comes before orders that are not.
    """

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
    """Nobody wants this order any more."""

    number: int


@dataclass(frozen=True)
class Trust:
    """The server holds this version of the weights, verified."""

    url: str
    version: int
    adapter: str | None = None


@dataclass(frozen=True)
class Fence:
    """The server's weights are not verified."""

    url: str


@dataclass(frozen=True)
class Hold:
    """The server gets no new requests until the next `Trust`; what runs comes back."""

    url: str


@dataclass(frozen=True)
class Join:
    """One more server, which may run so many completions more; it gets no requests before a `Trust`."""

    url: str
    num_slots: int


@dataclass(frozen=True)
class Leave:
    """The server is to get no more requests: what runs comes back, and then the collector says "left"."""

    url: str
    num_slots: int


@dataclass(frozen=True)
class Close:
    """The collector is to end."""


Message = Order | Cancel | Trust | Fence | Hold | Join | Leave | Close


class Outbox:
    """Sends messages in a thread, in lists of all that wait: a full pipe blocks this thread, not the caller.

    `gather_s`: after a first message it waits so long for more, or until `hurry`: threads of both sides wake up once
    for all of them.
    `on_error`: called in this thread if messages cannot be sent although the other side is there, for example because
    one cannot be pickled.  Nothing is sent after that.
    """

    def __init__(self, pipe: Connection, on_error: Callable[[Exception], None], *, gather_s: float = 0.0) -> None:
        self._pipe, self._on_error, self._gather_s = pipe, on_error, gather_s
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hurried = threading.Event()
        self._thread = threading.Thread(target=self._send_all, daemon=True, name="outbox")
        self._thread.start()

    def put(self, message: Any) -> None:
        self._waiting.put(message)

    def hurry(self) -> None:
        """Nothing more comes soon: what waits is sent at once; if nothing does, the next message is."""
        self._hurried.set()

    def close(self) -> None:
        """No more messages follow; the thread ends when all are sent, or when the other side is gone."""
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
            except OSError:  # the other side is gone: who reads its messages knows that too
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
