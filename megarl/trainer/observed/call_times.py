"""What the planner predicts of a run: its calls to the ranks, for the limits of the first ones, and its steps."""

from __future__ import annotations

import math
from dataclasses import replace

from megarl.config import Config
from megarl.plan.from_config import job_of
from megarl.plan.gpus import find
from megarl.plan.job import Job
from megarl.plan.limits import update_s
from megarl.plan.predict import stage_times, step_time
from megarl.plan.time import serving
from megarl.plan.time.constants import CONSTANTS
from megarl.plan.time.training import training

# Stage of a step -> kind of its calls (Group): a method and a role.
_PASSES = {"old_log_prob": "columns actor", "ref": "columns ref", "values": "columns critic"}
_MOST_LOST_S = 3600.0  # of work, before it is said


def predicted_s(config: Config, device: str) -> dict[str, float]:
    """Seconds of calls, by kind; empty where nothing is predicted.

    `device`: the name of the ranks' GPU.  Nothing is known of a CPU and of GPUs without an entry in plan/gpus.py, of
    models that the planner cannot count, nor of teachers' whole distributions.
    """
    job = _job(config, device)
    if job is None:
        return {}
    job = replace(job, old_share=1.0)  # single iterations have the pass over all completions, too
    stages = stage_times(job, training(job, None, CONSTANTS), serving.rollout(job, CONSTANTS), CONSTANTS)
    passes = {kind: stages[name] for name, kind in _PASSES.items() if name in stages}
    return passes | {f"update {role.name}": update_s(job, role, CONSTANTS) for role in job.roles if role.optimizer}


def lost_at_an_end(config: Config, device: str, num_steps: int) -> str:
    """What a run that is asked to end loses, as a sentence; "" if that is little, or nothing is predicted.

    A step that takes longer than trainer.term_grace_s does not end, and is not saved, before the run must have ended.
    """
    job, trainer = _job(config, device), config.trainer
    if job is None or (step_s := step_time(job)) <= trainer.term_grace_s:
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


def _job(config: Config, device: str) -> Job | None:
    try:
        job = job_of(config, find(device))
    except ValueError:  # `megarl plan` says why
        return None
    return None if job.reads_heads else job
