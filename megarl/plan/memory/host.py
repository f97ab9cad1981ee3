"""Host memory of a machine of the trainer: what roles offload to it, and copies of checkpoints that are being written.

Not counted: Python's processes, servers, rewards, and the file system's cache.
"""

from __future__ import annotations

from megarl.layout import Layout
from megarl.plan.job import Job, Role
from megarl.plan.memory.adapters import of_adapters
from megarl.plan.memory.count import whole
from megarl.plan.memory.gpu_budget import GpuBudget, fullest, summed
from megarl.plan.memory.memory import MOMENTS


def host_budget(job: Job) -> GpuBudget:
    """Bytes of the fullest machine by part."""
    return max((_of_machine(job, role) for role in job.roles), key=lambda budget: budget["total"])


def saved_bytes(role: Role) -> int:
    """Bytes of a checkpoint of the role, or of its adapters alone: weights, float32 master weights and moments."""
    width = 4 if role.dtype == "float32" else 2
    if role.lora_rank:
        count = of_adapters(role.hf, Layout(), 0, role.lora_rank, role.lora_targets).total
    else:
        count = whole(role.hf, role.name)
    return count * (width + 4 * MOMENTS[role.optimizer or "adamw"] + (0 if width == 4 else 4))


def _of_machine(job: Job, role: Role) -> GpuBudget:
    """Of the first machine of the role."""
    weights = optimizer = copies = 0
    first = role.first_rank // job.gpus_per_node * job.gpus_per_node
    for other in job.roles:
        end = min(first + job.gpus_per_node, other.first_rank + other.num_ranks)
        ranks = max(0, end - max(first, other.first_rank))  # on this machine
        memory = fullest(other)
        weights += ranks * memory.weights * (other.param_offload or job.shared)
        optimizer += ranks * memory.optimizer * (other.optimizer_offload or job.shared)
        if other.optimizer and job.async_save:
            copies += saved_bytes(other) * ranks // other.num_ranks
    return summed(weights=weights, optimizer=optimizer, save_copies=copies)
