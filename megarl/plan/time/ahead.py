"""Time between iterations when servers generate ahead of the training: `rollout.ahead` > 0 on GPUs of their own.

At most (ahead + 1) B prompts are outstanding, B those of an iteration, and new ones are admitted when the trainer
begins to wait.  Say the trainer waits w seconds for an iteration and works t seconds on it, and a share unfinished(x)
of the prompts admitted x seconds ago still lacks a completion.  The iteration is there as soon as the other ahead * B
outstanding prompts are all that is unfinished:

    unfinished(w) + unfinished(w + s) + unfinished(w + 2 s) + ... = ahead,  where s = w + t

order=finished: a prompt is finished with the last of its n completions, whose lengths are taken as independent.
order=prompts: an iteration is finished as a whole, with the slowest of its B * n completions.
This is a balance of means: an iteration of few prompts takes longer.  Full servers are a second limit: the tokens of an
iteration over those that the servers write a second.  The larger of both counts, so that where both are about equal the
prediction is up to a fifth too short (tests/plan/time/test_plan_ahead.py compares it with a simulation).
"""

from __future__ import annotations

from collections.abc import Callable
from math import gamma

from megarl.plan.job import Job
from megarl.plan.time.constants import Constants
from megarl.plan.time.lengths import running, tail_of

PROMPTS, FINISHED = "prompts", "finished"  # rollout.order
ROUNDS = 40  # of a bisection


def waited(job: Job, step_s: float, working_s: float, constants: Constants) -> float:
    """Seconds that the trainer waits for an iteration on which it works `working_s`, at servers with free places.

    `step_s`: of a decode step of a server.
    """
    tail = tail_of(job, constants)
    longest_s = tail * job.response_tokens * step_s
    if job.order == PROMPTS:
        end_s = slowest(job.sequences, tail) * longest_s
        return balanced_wait(job.ahead, working_s, lambda _: 1.0, end_s)
    return balanced_wait(
        job.ahead, working_s, lambda age_s: 1 - (1 - running(age_s / longest_s, tail)) ** job.n, longest_s
    )


def balanced_wait(ahead: int, working_s: float, unfinished: Callable[[float], float], end_s: float) -> float:
    """w of the equation above; `unfinished` is 0 from `end_s` on."""

    def are_enough(wait_s: float) -> bool:
        age_s, left = wait_s, 0.0
        while age_s < end_s and left <= ahead:
            left += unfinished(age_s)
            age_s += wait_s + working_s
        return left <= ahead

    low, high = 0.0, end_s
    if working_s > 0 and are_enough(low):
        return low
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if are_enough(middle) else (middle, high)
    return high


def slowest(count: int, tail: float) -> float:
    """Mean of the longest of `count` completions, over the longest that there can be (see lengths.py)."""
    if tail == 1:
        return 1.0
    power = 1 / (tail - 1)
    return 1 - gamma(1 + power) * count**-power
