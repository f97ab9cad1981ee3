"""Predicted times against the time limits of a run: what takes longer than its limit ends the run, or is done again.

Only a request that is being written may take longer: it ends with what it has, and another one continues its tokens.
One that has no token yet when its time is over has failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from megarl.plan.job import Job, Role, TimeLimits
from megarl.plan.memory.count import whole
from megarl.plan.memory.gpu_budget import fullest
from megarl.plan.memory.host import saved_bytes
from megarl.plan.time import transfers
from megarl.plan.time.constants import Constants
from megarl.plan.time.lengths import tail_of
from megarl.plan.time.serving import Rollout
from megarl.plan.time.training import training

NEAR = 0.5  # share of a limit above which a prediction is a warning, since lengths vary and predictions are off
ROUND_S = 100.0  # what is expected is a multiple of this


@dataclass(frozen=True)
class Limit:
    """A predicted time and its limit."""

    what: str
    seconds: float  # predicted
    limit_s: float
    key: str  # of the configuration
    continues: bool = False  # what takes longer is only cut, and continued

    @property
    def state(self) -> str:
        """ok | near (more than half of the limit) | exceeded | cut"""
        if self.continues:
            return "cut" if self.seconds > self.limit_s else "ok"
        return "exceeded" if self.seconds > self.limit_s else "near" if self.seconds > NEAR * self.limit_s else "ok"

    @property
    def expected_s(self) -> float:
        """The limit of which the prediction is half, rounded up."""
        return ceil(self.seconds / NEAR / ROUND_S) * ROUND_S

    def __str__(self) -> str:
        cut = ", so it is cut, and another request continues it" if self.state == "cut" else ""
        taken = f"{self.what} takes {self.seconds:.0f} s{cut}; expected {self.expected_s:.0f} or more"
        return f"{self.key}={self.limit_s:g}: {taken}"


def limits(job: Job, stages: Mapping[str, float], written: Rollout, constants: Constants) -> list[Limit]:
    """All that is predicted and has a limit.  Empty if the job has no configuration."""
    return list(_limits(job, stages, written, constants)) if job.time_limits else []


def _limits(job: Job, stages: Mapping[str, float], written: Rollout, constants: Constants) -> Iterator[Limit]:
    of = job.time_limits
    assert of is not None, "the caller has looked"
    tokens, request = piece_tokens(job, of, constants), (of.request_s, "rollout.request_timeout_s")
    yield Limit("the wait for a first token", wait_s(job, tokens, written), *request)
    yield Limit(f"a request of {tokens:.0f} tokens", piece_s(job, tokens, written), *request, continues=True)
    for name in ("old_log_prob", "ref", "teachers", "values", "update_weights"):
        if name in stages:
            yield Limit(name, stages[name], of.call_s, "trainer.call_timeout_s")
    for role in (job.critic, job.actor):
        if role is not None:
            longest_s = update_s(job, role, constants)
            yield Limit(f"update_{role.name}, one call", longest_s, of.call_s, "trainer.call_timeout_s")
    if of.loads_servers:
        yield Limit("loading a server", 2 * whole(job.hf) / constants.disk, of.start_s, "rollout.start_timeout_s")
    if of.saves and not job.async_save:  # else the call only copies to host memory
        for role in job.roles:
            if role.optimizer:
                yield Limit(f"saving {role.name}", save_s(job, role, constants), of.call_s, "trainer.call_timeout_s")


def piece_tokens(job: Job, of: TimeLimits, constants: Constants) -> float:
    """New tokens of the longest request: a piece of a completion, or all of it."""
    longest = tail_of(job, constants) * job.response_tokens
    return min(longest, of.piece_tokens or longest)


def wait_s(job: Job, tokens: float, written: Rollout) -> float:
    """Seconds that a request of so many tokens waits inside its server until others are finished.

    It does so where more are in flight than the KV cache holds.
    """
    outstanding = job.sequences / job.num_servers * (1 if job.drains else 1 + job.ahead)
    turns = max(0.0, min(job.in_flight, outstanding) - written.places) / written.places
    return _within(job, turns * min(job.response_tokens, tokens) * written.step_s, written)


def piece_s(job: Job, tokens: float, written: Rollout) -> float:
    """Seconds of such a request, from the order until it is written."""
    return _within(job, wait_s(job, tokens, written) + tokens * written.step_s, written)


def _within(job: Job, seconds: float, written: Rollout) -> float:
    """Servers that empty are faster, and end requests when their turn is over."""
    return seconds if job.overlaps else min(seconds, written.seconds)


def update_s(job: Job, role: Role, constants: Constants) -> float:
    """Seconds of the longest call of an update: that of its first optimizer step, which waits for offloaded moments."""
    update = training(job, role, constants)
    offload_s = transfers.offload_of_first_step(job, role, fullest(role), update.passes_s, constants)
    return update.seconds / job.optimizer_steps + offload_s


def save_s(job: Job, role: Role, constants: Constants) -> float:
    """Seconds in which all machines write what is trained: weights, their float32 copy, the optimizer's moments."""
    machines = max(1, role.num_ranks // job.gpus_per_node)
    return saved_bytes(role) / (machines * constants.disk)
