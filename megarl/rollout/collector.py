"""The child process behind `CollectorClient`: an asyncio loop that requests completions from servers and scores them.

It talks to the driver over one pipe. In: `Order`s, and which servers to use (`Trust`, `Fence`). Out: lists of all
waiting messages: ("group", ticket, index, packed group) and, at most once, ("error", sentence).
A group is sent as plain tuples and without its prompt, which the driver still has, to make pickling cheap.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from transformers import AutoTokenizer

from megarl.processes.lifetime import die_with_parent
from megarl.rollout.collect import Scored, collect_group
from megarl.rollout.pool import EnginePool
from megarl.rollout.protocol import SamplingParams
from megarl.sample import Completion, LostRollout, Prompt, Sample, VersionSpan

logger = logging.getLogger("megarl.rollout.collector")

PackedGroup = list[tuple[Any, ...]] | str  # one tuple per sample, or why the group is lost


class Scorer(Protocol):
    """A reward with resources: `start` and `stop` run in the child, before and after all scoring."""

    def start(self) -> None: ...

    def score(self, prompt: Prompt, completions: list[Completion]) -> Awaitable[Sequence[Scored]]: ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class CollectorSettings:
    urls: tuple[str, ...]
    token: str
    tokenizer_path: str
    timeout_s: float  # of one attempt of one request
    max_in_flight: int
    fenced: bool  # a server gets no request before a `Trust` names it
    make_scorer: Callable[[], Scorer]
    log_path: str
    parent_pid: int


@dataclass(frozen=True)
class Order:
    ticket: int
    prompts: list[Prompt]
    n: int
    params: SamplingParams
    greedy: bool = False  # also a greedy completion of each prompt


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


Message = Order | Trust | Fence


def run_collector(pipe: Connection, settings: CollectorSettings) -> None:
    """The child's main function; returns when the pipe is closed or after an error."""
    die_with_parent(settings.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C and closes the pipe
    _log_to(settings.log_path)
    outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
    sender = threading.Thread(target=_send_all, args=(pipe, outbox))
    sender.start()
    try:
        scorer = settings.make_scorer()
        scorer.start()
        try:
            asyncio.run(_collect(pipe, outbox, settings, scorer))
        finally:
            scorer.stop()
    except Exception as error:
        logger.exception("the collector ends")
        outbox.put(("error", traceback.format_exception_only(error)[-1].strip()))
    outbox.put(None)
    sender.join()


def _log_to(path: str) -> None:
    """Send stdout, stderr and the log of this process and its workers to the log file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


def _send_all(pipe: Connection, outbox: queue.SimpleQueue[Any]) -> None:
    """Runs in a thread: a full pipe blocks this thread, not the loop that sends requests to servers."""
    while True:
        messages = [outbox.get()]
        while not outbox.empty():
            messages.append(outbox.get())
        try:
            pipe.send([message for message in messages if message is not None])
        except BrokenPipeError:  # the driver closed its end
            return
        if messages[-1] is None:
            return


async def _collect(
    pipe: Connection, outbox: queue.SimpleQueue[Any], settings: CollectorSettings, scorer: Scorer
) -> None:
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[Message | None] = asyncio.Queue()
    reader = threading.Thread(target=_read_all, args=(pipe, loop, orders), daemon=True)
    reader.start()
    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer_path)
    pool = EnginePool(
        settings.urls,
        settings.token,
        timeout_s=settings.timeout_s,
        max_in_flight=settings.max_in_flight,
        vocab_size=len(tokenizer),
        fenced=settings.fenced,
    )

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    async def one(order: Order, index: int) -> None:
        prompt = order.prompts[index]
        group = await collect_group(
            pool, prompt, order.n, order.params, scorer.score, decode=decode, greedy=order.greedy
        )
        if isinstance(group, LostRollout):
            logger.warning("lost the rollout of %s: %s", prompt.uid, group.reason)
        outbox.put(("group", order.ticket, index, pack(group)))

    async with pool:
        try:
            async with asyncio.TaskGroup() as tasks:
                while (message := await orders.get()) is not None:
                    match message:
                        case Trust(url, version, adapter):
                            pool.trust(url, version, adapter)
                        case Fence(url):
                            pool.fence(url)
                        case Order():
                            for index in range(len(message.prompts)):
                                tasks.create_task(one(message, index))
                raise _Closed
        except ExceptionGroup as group:
            error = _first(group)
            if not isinstance(error, _Closed):
                raise error from group


class _Closed(Exception):
    """The pipe is closed: cancels all running tasks."""


def _read_all(pipe: Connection, loop: asyncio.AbstractEventLoop, orders: asyncio.Queue[Message | None]) -> None:
    while True:
        try:
            order = pipe.recv()
        except (EOFError, OSError):  # the driver closed its end, or died
            order = None
        if loop.is_closed():
            return
        loop.call_soon_threadsafe(orders.put_nowait, order)
        if order is None:
            return


def _first(group: ExceptionGroup[Exception]) -> Exception:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error


def pack(group: list[Sample] | LostRollout) -> PackedGroup:
    if isinstance(group, LostRollout):
        return group.reason
    return [
        (
            sample.completion.token_ids,
            sample.completion.log_probs,
            sample.completion.finish_reason,
            tuple(astuple(span) for span in sample.completion.versions),
            sample.completion.text,
            sample.reward,
            sample.reward_extra,
            sample.greedy_reward,
        )
        for sample in group
    ]


def unpack(packed: PackedGroup, prompt: Prompt) -> list[Sample] | LostRollout:
    """The group of `prompt`, as it was before `pack`."""
    if isinstance(packed, str):
        return LostRollout(prompt, packed)
    return [
        Sample(
            prompt,
            Completion(token_ids, log_probs, reason, tuple(VersionSpan(*span) for span in spans), text),
            reward,
            extra,
            greedy_reward,
        )
        for token_ids, log_probs, reason, spans, text, reward, extra, greedy_reward in packed
    ]
