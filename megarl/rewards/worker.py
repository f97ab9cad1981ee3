"""The code of a reward worker process: runs the function on one sample after another, each with a timeout."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType

from megarl.plugins import load_plugins
from megarl.rewards import RewardFn, load_reward
from megarl.rewards.result import RewardResult, to_result
from megarl.rewards.surroundings import Surroundings, end_children
from megarl.sample import Completion, Prompt

Job = tuple[Prompt, Completion]
Outcome = RewardResult | str  # a result, or an error message


class _TimeUpError(BaseException):
    """Not an Exception, so that a reward function that catches Exception does not catch its own timeout."""


class _Settings:
    """The settings of the process, and whether a sample's timeout is running."""

    reward: RewardFn | None = None
    timeout_s: float = 0.0
    armed: bool = False


def start_worker(
    fn: str, timeout_s: float, plugins: Sequence[str] = (), surroundings: Surroundings | None = None
) -> None:
    """Called once in every new process."""
    # A thread, because the main thread may be in a function that never returns when the run is killed.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    load_plugins(plugins)
    _Settings.reward = load_reward(fn)
    _Settings.timeout_s = timeout_s
    (surroundings or Surroundings()).set_up(timeout_s)
    signal.signal(signal.SIGALRM, _on_alarm)
    gc.freeze()  # else a collection visits all imported modules and copies their pages: 0.15 s within a step


def run_jobs(jobs: list[Job], budget_s: float) -> tuple[list[Outcome], float]:
    """Outcomes of the first jobs, as many as start within `budget_s`, and the seconds spent.

    The caller sends the rest again: so a task never lasts longer than the budget plus the timeout of one sample.
    """
    start = time.monotonic()
    outcomes: list[Outcome] = []
    for prompt, completion in jobs:
        outcomes.append(run_one(prompt, completion))
        if time.monotonic() - start > budget_s:
            break
    return outcomes, time.monotonic() - start


def run_one(prompt: Prompt, completion: Completion) -> Outcome:
    """Run the function on one sample; an exception, a bad return value or a timeout becomes a sentence."""
    assert _Settings.reward is not None, "start_worker comes first"
    try:
        _arm(_Settings.timeout_s)
        try:
            value = _Settings.reward(prompt, completion)
        finally:
            _disarm()
            end_children()
        return to_result(value)
    except _TimeUpError:
        return f"no answer within {_Settings.timeout_s:g} s"
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}{_place(error)}"


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


def _place(error: BaseException) -> str:
    """ " (file.py:12)" of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
