"""The child process behind `Collectors`: an asyncio loop that requests completions from servers and scores them."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from transformers import AutoTokenizer

from megarl.io.callers import allow_all_files
from megarl.io.environment import start_fork_server
from megarl.io.job_signals import leave_to_driver
from megarl.io.traces import Asked, asked, begin, span
from megarl.processes.garbage import collect_garbage_rarely
from megarl.processes.lifetime import die_with_parent
from megarl.rollout.collect import Completions, MakeGenerator, SampleGenerator, Score, Scored
from megarl.rollout.collector.blocked import LoopWatch
from megarl.rollout.collector.messages import Cancel, Close, Join, Leave, Message, Order, Outbox, pack, sentence
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.server_states import ServerState
from megarl.rollout.settings import GenerationSettings
from megarl.samples.sample import Completion, LostRollout, Prompt

logger = logging.getLogger("megarl.rollout.collector.collector")

HEARTBEAT_S = 1.0
BLOCKED_S = 10.0  # code that blocks the event loop for so long is named in the log
# Imported once for the processes of rewards and agents.
PRELOADED = ("__main__", "megarl.rewards.worker", "megarl.agents.process")
# What finishes within this time is one message; the last group of all is sent at once.
GATHER_S = 0.01


class Scorer(Protocol):
    """A reward with resources: `start` and `stop` run in the child, before and after all scoring."""

    @property
    def first_errors(self) -> Mapping[str, str]:
        """By kind of error, why the first sample could not be scored, or audited."""
        ...

    def start(self) -> None: ...

    def score(self, prompt: Prompt, completions: list[Completion]) -> Awaitable[Sequence[Scored | str]]: ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class CollectorSettings:
    """The settings of one collector, or of all that share the servers."""

    urls: tuple[str, ...]
    token: str = field(repr=False)
    tokenizer_path: str
    generation: GenerationSettings
    make_scorer: Callable[[], Scorer]  # pickled into each collector and called there, as is `make_generator`
    log_path: Path  # of several collectors, number i writes to <stem>_<i><suffix>
    make_generator: MakeGenerator = Completions
    parent_pid: int = field(default_factory=os.getpid)
    traces: Asked = field(default_factory=asked, repr=False)


def run_collector(pipe: Connection, settings: CollectorSettings) -> None:
    """The child's main function; returns after `Close`, when the pipe is closed, or after an error."""
    die_with_parent(settings.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C and ends this process
    _log_to(settings.log_path)
    allow_all_files()
    start_fork_server(*PRELOADED)  # before rewards and agents add variables of their own
    traces = begin(settings.log_path.parent.parent, "collector", settings.traces)
    leave_to_driver(runs_users_code=True)
    outbox = Outbox(pipe, partial(_report_unsendable, pipe), gather_s=GATHER_S)
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
    if traces:
        traces.close()


def _reason(error: BaseException) -> str:
    reason = sentence(error)
    if isinstance(error, Exception):
        return reason
    return f"{reason}: code of a reward or an agent ended its collector with it"


def _report_unsendable(pipe: Connection, error: Exception) -> None:
    """The last message of a collector whose messages cannot be sent."""
    logger.error("a message cannot be sent", exc_info=error)
    with contextlib.suppress(OSError):  # the driver is gone
        pipe.send([("error", sentence(error))])


def _log_to(path: Path) -> None:
    """Send stdout, stderr and the log of this process and its workers to the log file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


@dataclass
class ScoringTime:
    """How long one group waited for its rewards, after all of it, also the last of its episodes, was generated.

    Example:
        score = timed(scorer.score)
        SPENT.set(spent := ScoringTime())
        await generator.group(...)          # calls `score` in this task, or in tasks that it starts
        spent.seconds                       # between the last begin and the last end of a call
    """

    began: float = 0.0  # the last call of the reward
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.began)


SPENT: ContextVar[ScoringTime] = ContextVar("SPENT")  # of the group that the running task makes


def timed(score: Score, clock: Callable[[], float] = time.monotonic) -> Score:
    """The same reward, which notes in SPENT when it was called."""

    async def scored(prompt: Prompt, completions: list[Completion]) -> Sequence[Scored | str]:
        spent = SPENT.get()
        spent.began = clock()
        try:
            return await score(prompt, completions)
        finally:
            spent.ended = clock()

    return scored


async def _collect(pipe: Connection, outbox: Outbox, settings: CollectorSettings, scorer: Scorer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer_path)

    def report(url: str, reason: str) -> None:
        outbox.put(("unfit", url, reason))

    generation = settings.generation
    pool = EnginePool(settings.urls, settings.token, generation, report if generation.reports_unfit else None)
    generator = settings.make_generator(pool, tokenizer, timed(scorer.score))
    inbox: asyncio.Queue[list[Message] | Exception] = asyncio.Queue()
    collect_garbage_rarely()
    threading.Thread(target=_read_all, args=(pipe, asyncio.get_running_loop(), inbox), daemon=True).start()
    async with pool, generator:
        try:
            async with asyncio.TaskGroup() as tasks:
                await _Collecting(pool, generator, scorer, outbox, tasks).obey(inbox)
        except BaseExceptionGroup as group:
            error = _first(group)
            if not isinstance(error, _Closed):
                raise error from group


class _Collecting:
    """The running orders, from the first message to the last one."""

    def __init__(
        self, pool: EnginePool, generator: SampleGenerator, scorer: Scorer, outbox: Outbox, tasks: asyncio.TaskGroup
    ) -> None:
        self._pool = pool
        self._generator = generator
        self._scorer = scorer
        self._outbox = outbox
        self._tasks = tasks
        self._running: dict[int, asyncio.Task[None]] = {}  # by the number of the order
        self._reported: set[str] = set()  # kinds of first errors
        tasks.create_task(self._beat())

    async def obey(self, inbox: asyncio.Queue[list[Message] | Exception]) -> None:
        """Obey the messages.  Raises _Closed, or the error of reading one."""
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
            case ServerState():
                self._pool.update(message)
            case Join(url, num_slots):
                self._pool.join(url, num_slots)
            case Leave(url, num_slots):
                self._tasks.create_task(self._let_go(url, num_slots))
            case Close():
                raise _Closed

    async def _order(self, order: Order) -> None:
        spent = ScoringTime()
        SPENT.set(spent)  # of this task and of those that it starts
        step = self._pool.newest_version + 1  # of the trainer, while the group is made
        with span("group", step=step, uid=order.prompt.uid, n=order.n):
            group = await self._generator.group(
                order.prompt, order.n, order.params, greedy=order.greedy, urgent=order.urgent
            )
        self._report_first_errors()  # before its group: a run may end with that
        if isinstance(group, LostRollout):
            lost = f"lost the rollout of {order.prompt.uid}: {group.reason}"
            logger.warning(lost)
            if not self._reported:  # else the driver knows a reason
                self._report("lost", lost)
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
        watch = LoopWatch(self._report_blocked, limit_s=BLOCKED_S)
        while True:
            watch.beat()
            self._report_first_errors()
            self._outbox.put(("beat", self._pool.counters() | self._generator.counters()))
            faulthandler.dump_traceback_later(BLOCKED_S)  # unless the next beat puts it off
            await asyncio.sleep(HEARTBEAT_S)

    def _report_first_errors(self) -> None:
        for source in (self._scorer, self._generator):
            for kind in source.first_errors.keys() - self._reported:
                self._report(kind, source.first_errors[kind])

    def _report(self, kind: str, sentence: str) -> None:
        self._reported.add(kind)
        self._outbox.put(("first error", kind, sentence))

    def _report_blocked(self, sentence: str) -> None:
        logger.error(sentence)
        self._report("blocked", sentence)


class _Closed(Exception):
    """The driver wants no more: cancels all running tasks."""


def _read_all(
    pipe: Connection, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[list[Message] | Exception]
) -> None:
    """Put all messages into the inbox; the last is a list with a `Close`, or the error of reading one."""
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
