"""Predicted times against the time limits of a run: what takes longer than its limit ends the run, or is done again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from megarl.plan.job import Job, Role, TimeLimits
from megarl.plan.memory.count import whole
from megarl.plan.memory.host import saved_bytes
from megarl.plan.time.constants import Constants
from megarl.plan.time.lengths import tail_of
from megarl.plan.time.serving import Rollout

NEAR = 0.5  # share of a limit above which a prediction is a warning, since lengths vary and predictions are off
ROUND_S = 100.0  # what is expected is a multiple of this


@dataclass(frozen=True)
class Limit:
    """A predicted time and its limit."""

    what: str
    seconds: float  # predicted
    limit_s: float
    key: str  # of the configuration

    @property
    def state(self) -> str:
        """ok | near (more than half of the limit) | exceeded"""
        return "exceeded" if self.seconds > self.limit_s else "near" if self.seconds > NEAR * self.limit_s else "ok"

    @property
    def expected_s(self) -> float:
        """The limit of which the prediction is half, rounded up."""
        return ceil(self.seconds / NEAR / ROUND_S) * ROUND_S

    def __str__(self) -> str:
        taken = f"{self.what} takes {self.seconds:.0f} s; expected {self.expected_s:.0f} or more"
        return f"{self.key}={self.limit_s:g}: {taken}"


def limits(job: Job, stages: Mapping[str, float], written: Rollout, constants: Constants) -> list[Limit]:
    """All that is predicted and has a limit.  Empty if the job has no configuration."""
    return list(_limits(job, stages, written, constants)) if job.time_limits else []


def _limits(job: Job, stages: Mapping[str, float], written: Rollout, constants: Constants) -> Iterator[Limit]:
    of = job.time_limits
    assert of is not None, "the caller has looked"
    yield Limit(_piece(of), piece_s(job, of, written, constants), of.request_s, "rollout.request_timeout_s")
    for name in ("old_log_prob", "ref", "values", "update_weights"):
        if name in stages:
            yield Limit(name, stages[name], of.call_s, "trainer.call_timeout_s")
    for name in ("update_critic", "update_actor"):  # a call for each optimizer step
        if name in stages:
            yield Limit(f"{name}, one call", stages[name] / job.optimizer_steps, of.call_s, "trainer.call_timeout_s")
    if of.loads_servers:
        yield Limit("loading a server", 2 * whole(job.hf) / constants.disk, of.start_s, "rollout.start_timeout_s")
    if of.saves and not job.async_save:  # else the call only copies to host memory
        for role in job.roles:
            if role.optimizer and not role.lora_rank:
                yield Limit(f"saving {role.name}", save_s(job, role, constants), of.call_s, "trainer.call_timeout_s")


def _piece(of: TimeLimits) -> str:
    return f"a request of {of.piece_tokens} tokens" if of.piece_tokens else "a whole completion"


def piece_s(job: Job, of: TimeLimits, written: Rollout, constants: Constants) -> float:
    """Seconds of the slowest request: a piece of a completion, or all of it, from the order until it is written.

    As many requests are in flight as servers are told to run.  Where the KV cache holds fewer, a request first waits
    inside its server until others are finished.
    """
    longest = tail_of(job, constants) * job.response_tokens
    tokens = min(longest, of.piece_tokens or longest)
    outstanding = job.sequences / job.num_servers * (1 + (job.ahead if job.runs_ahead else 0))
    turns = max(0.0, min(job.max_running, outstanding) - written.places) / written.places
    seconds = (turns * min(job.response_tokens, tokens) + tokens) * written.step_s
    return seconds if job.runs_ahead else min(seconds, written.seconds)  # a server that empties is faster


def save_s(job: Job, role: Role, constants: Constants) -> float:
    """Seconds in which all machines write the role's weights, their float32 copy and the optimizer's moments."""
    machines = max(1, role.num_ranks // job.gpus_per_node)
    return saved_bytes(role) / (machines * constants.disk)
