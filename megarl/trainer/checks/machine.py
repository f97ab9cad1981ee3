"""Whether a run on CPUs fits into the memory of this machine."""

from __future__ import annotations

from dataclasses import replace

import torch

from megarl.config import Config, model_config, used_roles
from megarl.plan.from_config import job_of
from megarl.plan.gpus import GPUS
from megarl.plan.memory.cpu import cpu_budget, free_bytes
from megarl.plan.memory.gpu_budget import GpuBudget


def memory_on_cpu(config: Config, command: str) -> GpuBudget:
    """Part -> bytes of what `megarl COMMAND` takes of this machine, whose CPUs it uses; empty for a run on GPUs.

    It is empty too for a run over several machines, and where the config.json of a model is not here.
    """
    trainer = config.trainer
    is_here = trainer.device == "cpu" or (trainer.device == "auto" and not torch.cuda.is_available())
    if not is_here or trainer.nnodes > 1 or not all(model_config(config, role) for role in used_roles(config, command)):
        return {}
    job = job_of(config, GPUS["h100"], command=command)  # the type of GPU matters to no number that is used
    return cpu_budget(replace(job, num_servers=0) if config.rollout.urls else job)


def lacks_memory(budget: GpuBudget) -> str:
    """A sentence if less is free than the budget takes; "" otherwise."""
    free, needed = free_bytes(), budget.get("total", 0)
    if needed <= free:
        return ""
    return (
        f"the run takes about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free here: the system may "
        "end its processes; lower actor.ppo_max_token_len_per_gpu, data.train_batch_size or trainer.n_gpus_per_node"
    )
