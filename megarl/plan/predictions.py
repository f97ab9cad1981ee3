"""Warnings at the start of a run: too little memory for it on CPUs, and how much work an early end may cost."""

from __future__ import annotations

import math
from dataclasses import replace

from megarl.arch.gpus import GPUS, find
from megarl.config import Config, model_config, used_roles
from megarl.io.free_memory import free_bytes
from megarl.plan.from_config import job_of
from megarl.plan.gpu_budget import GpuBudget
from megarl.plan.host import cpu_budget
from megarl.plan.predict import step_time
from megarl.weights.count import check

_MOST_LOST_S = 3600.0  # of work, before it is reported


def memory_on_cpu(config: Config, command: str) -> GpuBudget:
    """Part -> bytes of memory that `megarl COMMAND` needs on this machine, for a run that uses its CPUs and no GPU.

    Nothing is predicted for a run on several machines, and of a model whose config.json is not here, or of a family
    that the planner does not know.
    """
    if config.trainer.nnodes > 1:
        return {}
    try:
        for role in used_roles(config, command):
            check(model_config(config, role))
    except ValueError:
        return {}
    job = job_of(config, GPUS["h100"], command=command)  # the type of GPU matters to no number that is used
    return cpu_budget(replace(job, num_servers=0) if config.rollout.urls else job)


def lacks_memory(budget: GpuBudget) -> str:
    """A warning if less memory is free than the budget needs; "" otherwise."""
    free, needed = free_bytes(), budget.get("total", 0)
    if needed <= free:
        return ""
    return (
        f"the run takes about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free here: the system may "
        "end its processes; lower actor.ppo_max_token_len_per_gpu, trainer.n_gpus_per_node or the batch"
    )


def lost_at_an_end(config: Config, device: str, num_steps: int) -> str:
    """A warning if a run that is asked to end may lose much work; "" if it loses little, or nothing is predicted.

    A step that takes longer than trainer.term_grace_s cannot finish, and is not saved, before the run must end.
    """
    trainer = config.trainer
    try:
        job = job_of(config, find(device))
    except ValueError:  # `megarl plan` explains it
        return ""
    if job.reads_heads or (step_s := step_time(job)) <= trainer.term_grace_s:  # teachers' heads are not predicted
        return ""
    steps = [num_steps]  # between saves
    steps += [trainer.save_freq] if trainer.save_freq > 0 else []
    steps += [math.ceil(trainer.save_every_s / step_s)] if trainer.save_every_s is not None else []
    lost_s = min(steps) * step_s
    if min(steps) == 1 or lost_s <= _MOST_LOST_S:
        return ""
    return (
        f"a step takes about {step_s:.0f} s (predicted), longer than trainer.term_grace_s={trainer.term_grace_s:g}: a "
        f"run that is asked to end may lose the work of {lost_s / 3600:.1f} hours since its last save; expected "
        "trainer.save_every_s=1800, or more time where the scheduler gives it"
    )
