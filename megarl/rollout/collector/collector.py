"""The child process behind `Collectors`: an asyncio loop that requests completions from servers and scores them.

It talks to the driver over one pipe, in the words of `messages`.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import resource
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Protocol

from transformers import AutoTokenizer

from megarl.processes.garbage import collect_garbage_rarely
from megarl.processes.lifetime import die_with_parent
from megarl.rollout.collect import MakeWriter, Scored, Writer
from megarl.rollout.collector.messages import (
    Cancel,
    Close,
    Fence,
    Hold,
    Join,
    Leave,
    Message,
    Order,
    Outbox,
    Trust,
    pack,
    sentence,
)
from megarl.rollout.collector.scoring_time import SPENT, ScoringTime, timed
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.wire_columns import EngineColumn
from megarl.sample import Completion, LostRollout, Prompt
from megarl.sandbox.environment import start_fork_server

logger = logging.getLogger("megarl.rollout.collector.collector")

HEARTBEAT_S = 1.0
BLOCKED_S = 10.0  # code that blocks the event loop for so long is named in the log
# What the processes of rewards and agents need, so that none of them imports it again.
PRELOADED = ("__main__", "megarl.rewards.worker", "megarl.agents.process")
# What finishes within this time is one message, as completions take much longer; the last group of all is sent at once.
GATHER_S = 0.01


class Scorer(Protocol):
    """A reward with resources: `start` and `stop` run in the child, before and after all scoring.

    `first_errors`: by kind of error, why the first sample could not be scored, or audited.
    """

    @property
    def first_errors(self) -> Mapping[str, str]: ...

    def start(self) -> None: ...

    def score(self, prompt: Prompt, completions: list[Completion]) -> Awaitable[Sequence[Scored | str]]: ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class CollectorSettings:
    urls: tuple[str, ...]
    token: str = field(repr=False)
    tokenizer_path: str
    timeout_s: float  # of one request
    max_in_flight: int  # completions
    piece_tokens: int  # of one request; 0: no limit
    fenced: bool  # a server gets no request before a `Trust` names it
    salted: bool  # the servers know salts of their prefix caches
    dp_ranks: int  # of each server, with a prefix cache each
    joins: bool  # short answers that are asked for at once travel in one request
    columns: tuple[EngineColumn, ...]  # what is to travel with the tokens of every completion
    num_ids: int | None  # of the model's vocabulary; None: not known
    reports_unfit: bool  # a server that fails again and again is fenced, and the driver is told
    slow_factor: float | None  # so is one whose replies take so many times as long as others'
    make_scorer: Callable[[], Scorer]
    make_writer: MakeWriter
    log_path: str
    parent_pid: int


def run_collector(pipe: Connection, settings: CollectorSettings) -> None:
    """The child's main function; returns when it is told to close, when the pipe is closed, or after an error."""
    die_with_parent(settings.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C and ends this process
    _log_to(settings.log_path)
    _allow_all_files()
    start_fork_server(*PRELOADED)  # before rewards and agents add variables of their own
    outbox = Outbox(pipe, partial(_tell, pipe), gather_s=GATHER_S)
    try:
        scorer = settings.make_scorer()
        scorer.start()
        try:
            asyncio.run(_collect(pipe, outbox, settings, scorer))
        finally:
            faulthandler.cancel_dump_traceback_later()
            scorer.stop()
    except BaseException as error:  # another collector would meet it again
        logger.exception("the collector ends")
        outbox.put(("error", _reason(error)))
    outbox.close()
    outbox.join()


def _reason(error: BaseException) -> str:
    said = sentence(error)
    return said if isinstance(error, Exception) else f"{said}: code of a reward or an agent ended its collector with it"


def _tell(pipe: Connection, error: Exception) -> None:
    """The last message of a collector whose messages cannot be sent."""
    logger.error("a message cannot be sent", exc_info=error)
    with contextlib.suppress(OSError):  # the driver is gone
        pipe.send([("error", sentence(error))])


def _log_to(path: str) -> None:
    """Send stdout, stderr and the log of this process and its workers to the log file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


def _allow_all_files() -> None:
    """Every request has a socket, and the usual limit is 1024 open files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _collect(pipe: Connection, outbox: Outbox, settings: CollectorSettings, scorer: Scorer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer_path)
    pool = EnginePool(
        settings.urls,
        settings.token,
        timeout_s=settings.timeout_s,
        max_in_flight=settings.max_in_flight,
        fenced=settings.fenced,
        salted=settings.salted,
        dp_ranks=settings.dp_ranks,
        joins=settings.joins,
        columns=settings.columns,
        num_ids=settings.num_ids,
        on_unfit=(lambda url, reason: outbox.put(("unfit", url, reason))) if settings.reports_unfit else None,
        slow_factor=settings.slow_factor,
    )
    writer = settings.make_writer(pool, tokenizer, timed(scorer.score), settings.piece_tokens)
    inbox: asyncio.Queue[list[Message] | Exception] = asyncio.Queue()
    collect_garbage_rarely()
    threading.Thread(target=_read_all, args=(pipe, asyncio.get_running_loop(), inbox), daemon=True).start()
    async with pool, writer:
        try:
            async with asyncio.TaskGroup() as tasks:
                await _Collecting(pool, writer, scorer, outbox, tasks).obey(inbox)
        except BaseExceptionGroup as group:
            error = _first(group)
            if not isinstance(error, _Closed):
                raise error from group


class _Collecting:
    """What runs between the first message and the last one."""

    def __init__(
        self, pool: EnginePool, writer: Writer, scorer: Scorer, outbox: Outbox, tasks: asyncio.TaskGroup
    ) -> None:
        self._pool, self._writer, self._scorer, self._outbox, self._tasks = pool, writer, scorer, outbox, tasks
        self._running: dict[int, asyncio.Task[None]] = {}  # by the number of the order
        self._told: set[str] = set()  # kinds of errors of rewards, of which the driver knows the first one
        tasks.create_task(self._beat())

    async def obey(self, inbox: asyncio.Queue[list[Message] | Exception]) -> None:
        """Do what the messages say.  Raises _Closed, or what happened when one was read."""
        while True:
            messages = await inbox.get()
            if isinstance(messages, Exception):
                raise messages
            for message in messages:
                self._obey(message)

    def _obey(self, message: Message) -> None:
        match message:
            case Order():
                task = self._running[message.number] = self._tasks.create_task(self._order(message))
                task.add_done_callback(partial(self._ended, message.number))
            case Cancel(number):
                if number in self._running:  # it may have ended just now
                    self._running[number].cancel()
            case Trust(url, version, adapter):
                self._pool.trust(url, version, adapter)
            case Fence(url):
                self._pool.fence(url)
            case Hold(url):
                self._pool.hold(url)
            case Join(url, num_slots):
                self._pool.join(url, num_slots)
            case Leave(url, num_slots):
                self._tasks.create_task(self._let_go(url, num_slots))
            case Close():
                raise _Closed

    async def _order(self, order: Order) -> None:
        spent = ScoringTime()
        SPENT.set(spent)  # of this task and of those that it starts
        group = await self._writer.group(order.prompt, order.n, order.params, greedy=order.greedy, urgent=order.urgent)
        if isinstance(group, LostRollout):
            logger.warning("lost the rollout of %s: %s", order.prompt.uid, group.reason)
        self._tell_reward_errors()  # before its group: a run may end with that
        self._outbox.put(("group", order.number, pack(group), spent.seconds))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        if self._running[number] is task:  # an order may come back after it was cancelled
            del self._running[number]
        if not self._running:
            self._outbox.hurry()

    async def _let_go(self, url: str, num_slots: int) -> None:
        await self._pool.leave(url, num_slots)
        self._outbox.put(("left", url))

    async def _beat(self) -> None:
        while True:
            self._tell_reward_errors()
            self._outbox.put(("beat", self._pool.counters() | self._writer.counters()))
            faulthandler.dump_traceback_later(BLOCKED_S)  # unless the next beat puts it off
            await asyncio.sleep(HEARTBEAT_S)

    def _tell_reward_errors(self) -> None:
        for kind in self._scorer.first_errors.keys() - self._told:
            self._told.add(kind)
            self._outbox.put(("reward error", kind, self._scorer.first_errors[kind]))


class _Closed(Exception):
    """The driver wants no more: cancels all running tasks."""


def _read_all(
    pipe: Connection, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[list[Message] | Exception]
) -> None:
    """Put all messages into the inbox; last a list with a `Close`, or what happened when a message was read."""
    messages: list[Message] | Exception = []
    while not isinstance(messages, Exception) and Close() not in messages:
        try:
            messages = pipe.recv()
        except (EOFError, OSError):  # the driver closed its end, or died
            messages = [Close()]
        except Exception as error:  # it cannot be unpickled
            messages = error
        if loop.is_closed():
            return
        loop.call_soon_threadsafe(inbox.put_nowait, messages)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
