"""Memory that a run takes on the CPUs of one machine, whose ranks, servers and own processes share it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil

from megarl.plan.job import Job
from megarl.plan.memory.gpu_budget import GpuBudget, fullest, summed
from megarl.plan.time.constants import CONSTANTS
from megarl.plan.time.serving import Server

CGROUP = Path("/sys/fs/cgroup")
PROCESS_BYTES = 200 * 10**6  # a rank, a server, a collector or the driver, without tensors: forks measured 100 to 240
NUM_PROCESSES = 3  # the driver, a collector, and the process from which ranks are forked


def cpu_budget(job: Job) -> GpuBudget:
    """Part -> bytes, at the moment when the role with the largest activations works; `total` is the last.

    Nothing is offloaded on a CPU, so that every role's weights, gradients and moments stay.  Servers of the hf engine
    have a copy of the weights, and a KV cache of all that runs at a time.
    """
    held = [(role, fullest(role)) for role in job.roles]
    ranks = max(role.first_rank + role.num_ranks for role, _ in held)
    server = Server(replace(job, cache_width=4 if job.dtype == "float32" else 2), CONSTANTS)
    return summed(
        weights=sum(role.num_ranks * memory.weights for role, memory in held),
        gradients=sum(role.num_ranks * memory.gradients for role, memory in held),
        optimizer=sum(role.num_ranks * memory.optimizer for role, memory in held),
        activations=max(role.num_ranks * (memory.activations + memory.gathered) for role, memory in held),
        servers=job.num_servers * server.weight_bytes + int(server.token_bytes * _most_cached(job)),
        processes=PROCESS_BYTES * (ranks + job.num_servers + NUM_PROCESSES),
    )


def _most_cached(job: Job) -> int:
    """Tokens in the KV caches of all servers: those of a step at most."""
    found = job.prompts * job.n * job.longest * (job.num_servers > 0)
    return found if job.max_total_tokens is None else min(found, job.num_servers * job.max_total_tokens)


def free_bytes() -> int:
    """Free memory of this machine, or what a container's limit leaves, if that is less.

    Pages of files that nobody has used for a while count as free, as the kernel gives them up first.
    """
    free: int = psutil.virtual_memory().available
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except FileNotFoundError:  # no container, or one of the first version of control groups
        return free
    return free if limit == "max" else min(free, int(limit) - int(used) + int(stat["inactive_file"]))
