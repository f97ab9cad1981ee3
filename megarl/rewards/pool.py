"""Rewards in processes of their own: a slow, hanging or crashing function stops neither the rollouts nor the run.

Each sample has its limit inside the process (a signal, which breaks into any loop of Python).  A function that hangs
where no signal reaches it, or takes its process down, is caught from outside: its process is replaced and the samples
of its task are run again one by one, so that the fault falls on the one that has it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
from collections import deque
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pebble import ProcessExpired, ProcessPool

from megarl.plugins import load_plugins
from megarl.rewards import load_reward
from megarl.rewards.result import RewardResult
from megarl.rewards.worker import Outcome, run_jobs, start_worker
from megarl.sample import REWARD_ERROR, Completion, Prompt

log = logging.getLogger(__name__)

BUDGET_S = 0.25  # a task begins no further sample after this
GRACE_S = 2.0  # beyond budget and limit, before a process is given up
FIRST_TASK = 8  # samples of a task before anything is known about their cost
MAX_RESTARTS = 3  # pools in a row that break before any answer
MAX_LOGGED = 10  # errors written out; all are counted


class RewardError(RuntimeError):
    """The reward function failed and the run asked to stop for that (reward.on_error=stop), or no process lives."""


@dataclass
class _Job:
    prompt: Prompt
    completion: Completion
    uid: str
    outcome: asyncio.Future[Outcome]
    alone: bool = False  # its task died: run it by itself


class RewardPool:
    """`num_workers` processes that run one reward function.

    Example: pool = RewardPool("gsm8k"); pool.start(); results = await pool.score(prompt, completions); pool.stop()
    `plugins`: modules or files that may register the function's name.
    Raises ValueError in the constructor when `fn` names no function.  `num_errors` counts the samples that failed.
    """

    def __init__(
        self,
        fn: str,
        num_workers: int = 1,
        timeout_s: float = 5.0,
        on_error: str = "zero",
        plugins: Sequence[str] = (),
    ) -> None:
        assert on_error in ("zero", "stop"), f"on_error is {on_error!r}, expected zero or stop"
        load_plugins(plugins)
        load_reward(fn)
        self._plugins = tuple(plugins)
        self.num_errors = 0
        self._fn = _absolute(fn)
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._on_error = on_error
        self._pool: ProcessPool | None = None
        self._waiting: deque[_Job] = deque()
        self._in_flight = 0
        self._pump_due = False
        self._restarts = 0
        self._task_size = FIRST_TASK

    def start(self) -> None:
        """Start the processes; takes about three seconds the first time, while their common ancestor imports."""
        context = multiprocessing.get_context("forkserver")  # the caller has threads, which a plain fork would break
        context.set_forkserver_preload(["__main__", "megarl.rewards.worker"])
        arguments = (self._fn, self._timeout_s, self._plugins)
        self._pool = ProcessPool(self._num_workers, initializer=start_worker, initargs=arguments, context=context)
        self._pool.active  # noqa: B018  reading it starts pebble's threads and processes

    def stop(self) -> None:
        """End the processes; who still waits for a score is cancelled."""
        while self._waiting:
            self._waiting.popleft().outcome.cancel()
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[RewardResult]:
        """The rewards of one group, in order.  A failed sample has reward 0 and extra {"reward_error": 1.0}.

        Raises RewardError, naming function and sample, when on_error="stop".
        """
        assert self._pool is not None, "start() comes before score()"
        loop = asyncio.get_running_loop()
        jobs = [
            _Job(prompt, completion, f"{prompt.uid}#{index}", loop.create_future())
            for index, completion in enumerate(completions)
        ]
        self._waiting.extend(jobs)
        self._pump_soon(loop)
        outcomes = await asyncio.gather(*(job.outcome for job in jobs))
        return [self._result(job, outcome) for job, outcome in zip(jobs, outcomes, strict=True)]

    def _result(self, job: _Job, outcome: Outcome) -> RewardResult:
        if isinstance(outcome, RewardResult):
            return outcome
        self.num_errors += 1
        sentence = f"reward {self._fn}, sample {job.uid}: {outcome}"
        if self._on_error == "stop":
            raise RewardError(sentence)
        if self.num_errors <= MAX_LOGGED:
            more = "; further errors are only counted" if self.num_errors == MAX_LOGGED else ""
            log.warning("%s; counted as 0%s", sentence, more)
        return RewardResult(0.0, {REWARD_ERROR: 1.0})

    def _pump_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send work after this turn of the loop: groups that arrive together share a task."""
        if not self._pump_due:
            self._pump_due = True
            loop.call_soon(self._pump, loop)

    def _pump(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give every free process a task."""
        self._pump_due = False
        if self._waiting and self._pool is not None and not self._pool.active:
            self._restart()
        while self._pool is not None and self._waiting and self._in_flight < self._num_workers:
            jobs = self._take()
            self._in_flight += 1
            task = self._pool.schedule(
                run_jobs,
                args=([(job.prompt, job.completion) for job in jobs], BUDGET_S),
                timeout=BUDGET_S + self._timeout_s + GRACE_S,
            )
            asyncio.wrap_future(task, loop=loop).add_done_callback(partial(self._done, loop, jobs))

    def _take(self) -> list[_Job]:
        """The next task: a fair share of what waits, no more than fits the budget, and an `alone` job by itself."""
        free = self._num_workers - self._in_flight
        size = min(self._task_size, math.ceil(len(self._waiting) / free))
        jobs = [self._waiting.popleft()]
        while not jobs[0].alone and len(jobs) < size and self._waiting and not self._waiting[0].alone:
            jobs.append(self._waiting.popleft())
        return jobs

    def _done(self, loop: asyncio.AbstractEventLoop, jobs: list[_Job], task: asyncio.Future) -> None:
        """A task came back: settle its samples and send the next."""
        self._in_flight -= 1
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._answered(jobs, *task.result())
        elif isinstance(error, (FutureTimeoutError, ProcessExpired)):
            self._process_lost(jobs, error)
        elif isinstance(error, BrokenProcessPool) and self._restarts < MAX_RESTARTS:
            self._again(jobs)
        else:
            for job in jobs:
                _settle(job, RewardError(f"reward {self._fn}: the reward processes cannot run ({error!r})"))
        if self._pool is not None:
            self._pump_soon(loop)

    def _answered(self, jobs: list[_Job], outcomes: list[Outcome], seconds: float) -> None:
        self._restarts = 0
        for job, outcome in zip(jobs, outcomes, strict=False):  # a task out of budget answers for its first samples
            _settle(job, outcome)
        self._waiting.extendleft(reversed(jobs[len(outcomes) :]))
        # Half the budget's worth, growing fourfold at most: one quick sample says little about the next.
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
        """A new pool instead of a broken one."""
        assert self._pool is not None, "only a started pool breaks"
        self._restarts += 1
        log.warning("the reward processes ended; starting new ones (%d of %d)", self._restarts, MAX_RESTARTS)
        self._pool.stop()
        self._pool.join()
        self.start()


def _settle(job: _Job, outcome: Outcome | RewardError) -> None:
    """Hand over an outcome, unless the caller has given up waiting."""
    if job.outcome.done():
        return
    if isinstance(outcome, RewardError):
        job.outcome.set_exception(outcome)
    else:
        job.outcome.set_result(outcome)


def _absolute(fn: str) -> str:
    """A file's address that holds in every process, whatever its working directory."""
    place, colon, name = fn.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{name}" if colon and place.endswith(".py") else fn
