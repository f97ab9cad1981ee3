"""Times of transfers between the passes of a step: a push to the servers, and offload to host memory and back.

Transports of a push (`job.push`):

sharded, shared   each GPU of a server gets its own part from ranks that hold it; every replica of the actor sends
gathered          whole tensors are gathered from the ranks that hold parts, and sent to every server
"""

from __future__ import annotations

from math import ceil

from megarl.plan.job import Job, Role
from megarl.plan.memory.count import num_experts, sparse_layers, whole
from megarl.plan.memory.memory import Memory
from megarl.plan.time.constants import CONSTANTS, Constants

DENSE_TENSORS, EXPERT_TENSORS = 12, 3  # of a layer, and of an expert, in Hugging Face's format


def push(job: Job, constants: Constants = CONSTANTS) -> float:
    """Seconds until every server has the new weights."""
    num_bytes = 2 * whole(job.hf)
    fixed = constants.push_s + tensors(job) * constants.push_tensor_s
    if job.push == "gathered":
        return fixed + _gather(job, num_bytes, constants) + num_bytes / (job.gpu.nic_bandwidth * constants.broadcast)
    received = num_bytes / job.server_gpus
    sent = num_bytes * job.num_servers / job.num_ranks  # by each rank, if all ranks take part
    near = near_share(job)
    far_s = max(received, sent) * (1 - near) / (job.gpu.nic_bandwidth * constants.push_nic)
    near_s = max(received, sent) * near / (job.gpu.link_bandwidth * constants.push_link)
    return fixed + max(far_s, near_s)


def near_share(job: Job) -> float:
    """Share of a server's weights that ranks on its own machine hold.

    Megatron orders ranks tp, cp, ep, dp, pp, so a machine holds only as many pipeline stages as fit on it.
    """
    if not job.shared:
        return 0.0
    machines = max(1, ceil(job.num_ranks / job.link_domain))
    return 1 / min(job.layout.pp, machines)


def tensors(job: Job) -> int:
    """Number of tensors, each with a fixed cost; in shards, the experts of a layer are sent stacked."""
    sparse = sparse_layers(job.hf)
    experts = (num_experts(job.hf) or 0) if job.push == "gathered" else 1
    return len(sparse) * DENSE_TENSORS + sum(sparse) * experts * EXPERT_TENSORS


def _gather(job: Job, num_bytes: int, constants: Constants) -> float:
    """Seconds in which every sending rank gathers the parts of the other ranks of its replica."""
    layout = job.layout
    size = job.num_ranks if job.fsdp else max(layout.tp, layout.ep * layout.expert_tp) * layout.pp
    if size == 1:
        return 0.0
    is_near = size <= job.link_domain
    bandwidth = job.gpu.link_bandwidth if is_near else job.gpu.nic_bandwidth
    return num_bytes * (size - 1) / size / (bandwidth * constants.gather)


def offload_of_call(job: Job, role: Role, held: Memory, constants: Constants, *, learns: bool) -> float:
    """Seconds of offload for a pass over a batch or an optimizer step."""
    moved = held.weights if role.param_offload else 0
    moved += held.optimizer if learns and role.optimizer_offload else 0
    return _both_ways(job, moved, constants)


def offload_of_push(job: Job, held: Memory, constants: Constants) -> float:
    """Seconds of offload of the actor's weights, if they are offloaded before a push."""
    return _both_ways(job, held.weights if job.shared or job.param_offload else 0, constants)


def offload_of_turn(job: Job, role: Role, held: Memory, constants: Constants) -> float:
    """Seconds of offload of everything that stays on the GPU during the trainer's turn, with colocation."""
    moved = (0 if role.param_offload else held.weights) + (0 if role.optimizer_offload else held.optimizer)
    return _both_ways(job, moved if job.shared else 0, constants)


def offload_of_servers(job: Job, constants: Constants) -> float:
    """Seconds in which servers release their memory before the training and resume it afterwards."""
    return constants.sleep_s + constants.wake_s if job.shared else 0.0


def _both_ways(job: Job, num_bytes: int, constants: Constants) -> float:
    return 2 * num_bytes / (job.gpu.host_bandwidth * constants.host)
