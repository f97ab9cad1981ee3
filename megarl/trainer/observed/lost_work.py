"""What a run that is asked to end loses, as the planner predicts it."""

from __future__ import annotations

import math

from megarl.config import Config
from megarl.plan.from_config import job_of
from megarl.plan.gpus import find
from megarl.plan.predict import step_time

_MOST_LOST_S = 3600.0  # of work, before it is said


def lost_at_an_end(config: Config, device: str, num_steps: int) -> str:
    """What a run that is asked to end loses, as a sentence; "" if that is little, or nothing is predicted.

    A step that takes longer than trainer.term_grace_s does not end, and is not saved, before the run must have ended.
    """
    trainer = config.trainer
    try:
        job = job_of(config, find(device))
    except ValueError:  # `megarl plan` says why
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
