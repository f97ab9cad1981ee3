"""Seconds in which bytes go to host memory and come back, so that roles and servers can share a GPU.

A role with offload comes for each call that needs it and goes behind it: its weights for a pass or a push, all but its
gradients for an optimizer step.  One without stays for the trainer's whole turn where servers share its GPUs, and else
never moves.
"""

from __future__ import annotations

from megarl.plan.job import Job, Role
from megarl.plan.memory.memory import Memory
from megarl.plan.time.constants import Constants


def of_call(job: Job, role: Role, held: Memory, constants: Constants, *, learns: bool) -> float:
    """One pass over a batch, or one optimizer step."""
    moved = held.weights if role.param_offload else 0
    moved += held.optimizer if learns and role.optimizer_offload else 0
    return _both_ways(job, moved, constants)


def of_push(job: Job, held: Memory, constants: Constants) -> float:
    """The actor's weights, where they sleep between the trainer's turns."""
    return _both_ways(job, held.weights if job.shared or job.param_offload else 0, constants)


def of_turn(job: Job, role: Role, held: Memory, constants: Constants) -> float:
    """What stays for the turn, where there are turns."""
    moved = (0 if role.param_offload else held.weights) + (0 if role.optimizer_offload else held.optimizer)
    return _both_ways(job, moved if job.shared else 0, constants)


def of_servers(job: Job, constants: Constants) -> float:
    """They give their memory back before the training and take it again behind it."""
    return constants.sleep_s + constants.wake_s if job.shared else 0.0


def _both_ways(job: Job, num_bytes: int, constants: Constants) -> float:
    return 2 * num_bytes / (job.gpu.host_bandwidth * constants.host)
