"""Runs rewards in worker processes: a slow, hanging or crashing function stops neither the rollout nor the run.

Each sample has a timeout inside the process (a signal, which interrupts any Python code).  If a function hangs where
signals do not reach it, or crashes its process, the process is replaced and the samples of its task are run again one
by one, so that only the faulty sample fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import ForkServerContext, ForkServerProcess

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from megarl.io.environment import start_fork_server
from megarl.plugins.load import absolute, load_plugins
from megarl.processes.restarts import Restarts
from megarl.rewards import load_reward
from megarl.rewards.result import Outcome
from megarl.rewards.surroundings import Surroundings
from megarl.rewards.worker import run_jobs, start_worker
from megarl.samples.sample import Completion, Prompt

log = logging.getLogger(__name__)

BUDGET_S = 0.25  # a task starts no further sample after this time
GRACE_S = 2.0  # after budget and timeout, before a process is killed
FIRST_TASK = 8  # samples of a task before their cost is known
LOOK_S = 1.0  # between two looks at whether the pool of a running task broke
MAX_RESTARTS = 3  # restarts in a row without any result


class RewardError(RuntimeError):
    """A reward failed with reward.on_error=stop, or the worker processes cannot run."""


class _Worker(ForkServerProcess):
    terminate = ForkServerProcess.kill  # which pebble calls; they leave SIGTERM to the driver


class _Context(ForkServerContext):  # the caller has threads: a plain fork is not safe
    Process = _Worker


@dataclass
class _Job:
    fn: str
    prompt: Prompt
    completion: Completion
    outcome: asyncio.Future[Outcome]
    alone: bool = False  # its task died: run it in a task of its own


class RewardPool:
    """`num_workers` worker processes that run reward functions.

    Example:

        pool = RewardPool(["gsm8k"])
        pool.start()
        outcomes = await pool.score("gsm8k", prompt, completions)
        pool.stop()

    `plugins`: modules or files that may register a function's name.  `surroundings`: limits of a process.
    The processes inherit the variables with which this one started its fork server: see start_fork_server.
    The constructor raises ValueError if one of `fns` names no function.
    """

    def __init__(
        self,
        fns: Sequence[str],
        num_workers: int = 1,
        timeout_s: float = 5.0,
        plugins: Sequence[str] = (),
        surroundings: Surroundings | None = None,
    ) -> None:
        load_plugins(plugins)
        for fn in fns:
            load_reward(fn)
        self._plugins, self._surroundings = tuple(plugins), surroundings or Surroundings()
        self._fns = {fn: absolute(fn) for fn in fns}
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._pool: ProcessPool | None = None
        self._waiting: deque[_Job] = deque()
        self._in_flight = 0
        self._pump_due = False
        self._restarts = Restarts(MAX_RESTARTS)
        self._task_size = FIRST_TASK

    def start(self) -> None:
        """Start the processes; the first time this takes about three seconds, while the fork server imports."""
        start_fork_server("__main__", "megarl.rewards.worker")
        arguments = (self._fns, self._timeout_s, self._plugins, self._surroundings)
        self._pool = ProcessPool(self._num_workers, initializer=start_worker, initargs=arguments, context=_Context())
        self._pool.active  # noqa: B018  reading it starts pebble's threads and processes

    def stop(self) -> None:
        """End the processes and cancel waiting samples."""
        while self._waiting:
            self._waiting.popleft().outcome.cancel()
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    async def score(self, fn: str, prompt: Prompt, completions: Sequence[Completion]) -> list[Outcome]:
        """The outcomes of one group, in order: a result, or a sentence that says why there is none.

        Raises RewardError if the processes cannot run.
        """
        assert self._pool is not None, "start() comes before score()"
        loop = asyncio.get_running_loop()
        jobs = [
            # Without the columns: rewards do not read them, and they may be many times as large as the tokens.
            _Job(fn, prompt, replace(completion, columns={}), loop.create_future())
            for completion in completions
        ]
        self._waiting.extend(jobs)
        self._pump_soon(loop)
        return await asyncio.gather(*(job.outcome for job in jobs))

    def _pump_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send work after this iteration of the event loop, so that groups that arrive together share a task."""
        if not self._pump_due:
            self._pump_due = True
            loop.call_soon(self._pump, loop)

    def _pump(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give every free process a task."""
        self._pump_due = False
        if self._waiting and self._pool is not None and not self._pool.active:
            if self._restarts.are_used_up:
                return self._give_up("they end as soon as they start")
            self._restart()
        while self._pool is not None and self._waiting and self._in_flight < self._num_workers:
            jobs = self._take()
            try:
                task = self._pool.schedule(
                    run_jobs,
                    args=([(job.fn, job.prompt, job.completion) for job in jobs], BUDGET_S),
                    timeout=BUDGET_S + self._timeout_s + GRACE_S,
                )
            except RuntimeError:  # the pool broke a moment ago
                self._waiting.extendleft(reversed(jobs))
                self._pump_soon(loop)
                return
            self._in_flight += 1
            asyncio.wrap_future(task, loop=loop).add_done_callback(partial(self._done, loop, jobs))
            loop.call_later(LOOK_S, self._look, loop, self._pool, task)

    def _look(self, loop: asyncio.AbstractEventLoop, pool: ProcessPool, task: ProcessFuture) -> None:
        """Fail a task whose pool broke while it got the task: such a pool never answers it."""
        if task.done():
            return
        if pool.active:
            loop.call_later(LOOK_S, self._look, loop, pool, task)
        else:
            with contextlib.suppress(InvalidStateError):  # it was answered after all
                task.set_exception(BrokenProcessPool("it broke while it was given the task"))

    def _give_up(self, why: str) -> None:
        """Give all waiting samples the reason why they cannot be scored."""
        while self._waiting:
            job = self._waiting.popleft()
            _settle(job, RewardError(f"reward {job.fn}: the reward processes cannot run ({why})"))

    def _take(self) -> list[_Job]:
        """The next task: an equal share of the waiting jobs, at most what fits the budget; an `alone` job by itself."""
        free = self._num_workers - self._in_flight
        size = min(self._task_size, math.ceil(len(self._waiting) / free))
        jobs = [self._waiting.popleft()]
        while not jobs[0].alone and len(jobs) < size and self._waiting and not self._waiting[0].alone:
            jobs.append(self._waiting.popleft())
        return jobs

    def _done(self, loop: asyncio.AbstractEventLoop, jobs: list[_Job], task: asyncio.Future) -> None:
        """A task has ended: settle its samples and send the next."""
        self._in_flight -= 1
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._answered(jobs, *task.result())
        elif isinstance(error, (FutureTimeoutError, ProcessExpired)):
            self._process_lost(jobs, error)
        elif isinstance(error, BrokenProcessPool) and not self._restarts.are_used_up:
            self._again(jobs)
        else:
            for job in jobs:
                _settle(job, RewardError(f"reward {job.fn}: the reward processes cannot run ({error!r})"))
        if self._pool is not None:
            self._pump_soon(loop)

    def _answered(self, jobs: list[_Job], outcomes: list[Outcome], seconds: float) -> None:
        self._restarts.count = 0
        for job, outcome in zip(jobs, outcomes, strict=False):  # after its budget a task returns only its first samples
            _settle(job, outcome)
        self._waiting.extendleft(reversed(jobs[len(outcomes) :]))
        # As many as take half the budget; at most 4 times as many as before, because costs differ between samples.
        affordable = int(0.5 * BUDGET_S * len(outcomes) / max(seconds, 1e-6))
        self._task_size = max(1, min(affordable, max(4 * self._task_size, 64)))

    def _process_lost(self, jobs: list[_Job], error: BaseException) -> None:
        if len(jobs) > 1:
            self._again(jobs)
        elif isinstance(error, ProcessExpired):
            _settle(jobs[0], f"its process died with exit code {error.exitcode}")
        else:
            _settle(jobs[0], f"no answer within {self._timeout_s:g} s, and no way to interrupt it")

    def _again(self, jobs: list[_Job]) -> None:
        for job in jobs:
            job.alone = True
        self._waiting.extendleft(reversed(jobs))

    def _restart(self) -> None:
        """Replace a broken pool by a new one."""
        assert self._pool is not None, "only a started pool breaks"
        self._restarts.count += 1
        log.warning("the reward processes ended; starting new ones (%d of %d)", self._restarts.count, MAX_RESTARTS)
        self._pool.stop()
        self._pool.join()
        self.start()


def _settle(job: _Job, outcome: Outcome | RewardError) -> None:
    """Set the outcome of a job, unless its caller was cancelled."""
    if job.outcome.done():
        return
    if isinstance(outcome, RewardError):
        job.outcome.set_exception(outcome)
    else:
        job.outcome.set_result(outcome)
