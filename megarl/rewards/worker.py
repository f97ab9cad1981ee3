"""The code of a reward worker process: runs the functions on one sample after another, each with a timeout."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from megarl.io.job_signals import leave_to_driver, num_received
from megarl.plugins.load import describe, load_plugins
from megarl.rewards import RewardFn, load_reward
from megarl.rewards.functions.auto import with_pred
from megarl.rewards.result import Outcome, to_result
from megarl.rewards.surroundings import Surroundings, end_children, time_limit_s
from megarl.samples.sample import Completion, Prompt

Job = tuple[str, Prompt, Completion]  # the name of the reward, and a sample


class _TimeUpError(BaseException):
    """Not an Exception, so that a reward function that catches Exception does not catch its own timeout."""


class _Settings:
    """The settings of the process, and whether a sample's timeout is running."""

    rewards: Mapping[str, RewardFn] = {}
    armed: bool = False


def start_worker(
    fns: Mapping[str, str], timeout_s: float, plugins: Sequence[str] = (), surroundings: Surroundings | None = None
) -> None:
    """Called once in every new process.  `fns`: name -> address of the function."""
    # A thread, because the main thread may be in a function that never returns when the run is killed.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    surroundings = surroundings or Surroundings()
    multiprocessing.set_start_method(None, force=True)  # Python's default, not the one by which this process started
    os.environ.update(surroundings.environment)  # a reward's file may look at them when it is imported
    load_plugins(plugins)
    _Settings.rewards = {name: load_reward(fn) for name, fn in fns.items()}
    surroundings.set_up(timeout_s)
    signal.signal(signal.SIGALRM, _on_alarm)
    leave_to_driver(runs_users_code=True)
    gc.freeze()  # else a collection visits all imported modules and copies their pages: 0.15 s within a step


def run_jobs(jobs: list[Job], budget_s: float) -> tuple[list[Outcome], float]:
    """Outcomes of the first jobs, as many as start within `budget_s`, and the seconds spent.

    The caller sends the rest again: so a task never lasts longer than the budget plus the timeout of one sample.
    """
    start = time.monotonic()
    outcomes: list[Outcome] = []
    for job in jobs:
        outcomes.append(run_one(*job))
        if time.monotonic() - start > budget_s:
            break
    return outcomes, time.monotonic() - start


def run_one(fn: str, prompt: Prompt, completion: Completion) -> Outcome:
    """Run a function on one sample; an exception, a bad return value or a timeout becomes a sentence."""
    try:
        before, outcome = num_received(), _outcome(fn, prompt, completion)
        # Again after a signal to the whole job, which ends programs that the function has started.
        return outcome if num_received() == before else _outcome(fn, prompt, completion)
    finally:  # nothing refers to the function's variables any more, not even an exception
        end_children()


def _outcome(fn: str, prompt: Prompt, completion: Completion) -> Outcome:
    reward = _Settings.rewards[fn]
    try:
        _arm(time_limit_s())
        try:
            return with_pred(fn, prompt, completion, to_result(reward(prompt, completion)))
        finally:
            _disarm()
    except _TimeUpError:
        return f"no answer within {time_limit_s():g} s"
    except (Exception, SystemExit) as error:
        return describe(error, reward)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)


def _arm(timeout_s: float) -> None:
    _Settings.armed = True
    # Again every second: the first exception may be lost, for example in a destructor.
    signal.setitimer(signal.ITIMER_REAL, timeout_s, 1.0)


def _disarm() -> None:
    _Settings.armed = False  # before the timer: a signal that is already pending must have no effect
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def _on_alarm(signum: int, frame: FrameType | None) -> None:
    if _Settings.armed:
        raise _TimeUpError
