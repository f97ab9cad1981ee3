"""What the planner predicts of the calls to the ranks, for the limits of the first ones."""

from __future__ import annotations

from megarl.config import Config
from megarl.plan.from_config import job_of
from megarl.plan.gpus import find
from megarl.plan.predict import stage_times
from megarl.plan.time import serving
from megarl.plan.time.constants import CONSTANTS
from megarl.plan.time.training import training

# Stage of a step -> kind of its calls (Group): a method and a role.
_PASSES = {"old_log_prob": "columns actor", "ref": "columns ref", "values": "columns critic"}
_UPDATES = {"update_actor": "update actor", "update_critic": "update critic"}  # a call for each optimizer step


def predicted_s(config: Config, device: str) -> dict[str, float]:
    """Seconds of calls, by kind; empty where nothing is predicted.

    `device`: the name of the ranks' GPU.  Nothing is known of a CPU and of GPUs without an entry in plan/gpus.py, of
    models that the planner cannot count, nor of teachers' whole distributions.
    """
    try:
        job = job_of(config, find(device))
    except ValueError:  # `megarl plan` says why
        return {}
    if job.reads_heads:
        return {}
    stages = stage_times(job, training(job, None, CONSTANTS), serving.rollout(job, CONSTANTS), CONSTANTS)
    passes = {kind: stages[name] for name, kind in _PASSES.items() if name in stages}
    return passes | {kind: stages[name] / job.optimizer_steps for name, kind in _UPDATES.items() if name in stages}
