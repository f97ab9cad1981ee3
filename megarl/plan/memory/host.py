"""Host memory of a machine: what roles offload to it, copies of checkpoints that are being written, replays, teachers.

Not counted: Python's processes, servers (but for routing replay), rewards, and the file system's cache.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.layout import Layout
from megarl.plan.job import Job, Role
from megarl.plan.memory import routes, support, taught
from megarl.plan.memory.adapters import of_adapters
from megarl.plan.memory.count import whole
from megarl.plan.memory.gpu_budget import GpuBudget, fullest, summed
from megarl.plan.memory.memory import MOMENTS


def host_budget(job: Job) -> GpuBudget:
    """Bytes of the fullest machine by part: of the trainer's, or with servers of their own of a machine of these."""
    found = [_of_machine(job, role) for role in job.roles]
    if not job.shared:
        found.append(summed(server_routes=routes.machine_bytes(job)))
    return max(found, key=lambda budget: budget["total"])


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
    weights = optimizer = copies = of_teachers = 0
    first = role.first_rank // job.gpus_per_node * job.gpus_per_node
    for other in job.roles:
        end = min(first + job.gpus_per_node, other.first_rank + other.num_ranks)
        ranks = max(0, end - max(first, other.first_rank))  # on this machine
        memory = fullest(other)
        weights += ranks * memory.weights * (other.param_offload or job.shared)
        optimizer += ranks * memory.optimizer * (other.optimizer_offload or job.shared)
        if other.optimizer_on_host:  # the moments, and as much again: a copy of the weights, and their gradients
            on_gpu = fullest(replace(other, optimizer_on_host=False)).optimizer
            optimizer += ranks * 2 * (on_gpu - memory.optimizer)
        if other.optimizer and job.async_save:
            copies += saved_bytes(other) * ranks // other.num_ranks
        if other.name == "actor":
            of_teachers += ranks * taught.rank_bytes(job)
    return summed(
        weights=weights,
        optimizer=optimizer,
        save_copies=copies,
        routes=routes.driver_bytes(job) if first == 0 else 0,  # the driver is on the first machine
        server_routes=routes.machine_bytes(job) if job.shared else 0,
        support=support.driver_bytes(job) if first == 0 else 0,
        taught=of_teachers + (taught.driver_bytes(job) if first == 0 else 0),
    )
