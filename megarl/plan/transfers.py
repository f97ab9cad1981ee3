"""Times of transfers between the passes of a step: a push to the servers, and offload to host memory and back.

Transports of a push (megarl/weights/push):

sharded    each GPU of a server gets its own part from ranks that hold it; every replica of the actor sends
shared     the same for servers on the trainer's GPUs: the rank on a GPU receives, and the server copies from its memory
gathered   servers on GPUs of their own: whole tensors are gathered in buckets, and rank 0 broadcasts each bucket to
           every server
mapped     servers on the trainer's GPUs: the same buckets, which servers map

The optimizer's state comes to the GPU beside the passes of the first optimizer step, which then waits for the rest of
it (Worker.onload); weights come before them, and nothing is computed while a role leaves.
"""

from __future__ import annotations

from math import ceil

from megarl.arch.layout import Layout
from megarl.plan.constants import Links
from megarl.plan.job import Job, Role
from megarl.plan.memory import Memory
from megarl.weights.count import kinds_of, of_stage, whole


def push(job: Job) -> float:
    """Seconds until every server has the new weights."""
    num_bytes = 2 * whole(job.actor.hf)
    fixed = job.constants.push_s + tensors(job) * job.constants.push_tensor_s
    if job.push == "sharded":
        return fixed + _slices(job, num_bytes)
    gather_s = _gather(job, num_bytes)
    if job.shared:
        return fixed + mapped_push(job, num_bytes, gather_s)
    fixed += ceil(num_bytes / job.bucket_bytes) * job.constants.bucket_s
    return fixed + gather_s + num_bytes / (job.gpu.nic_bandwidth * job.constants.broadcast)


def _slices(job: Job, num_bytes: int) -> float:
    """Seconds until every GPU of the servers has its own part."""
    received, num_ranks = num_bytes / job.server_gpus, job.actor.num_ranks
    moved = max(received, num_bytes * job.num_servers / num_ranks)  # sent by each rank, if all ranks take part
    nic = job.gpu.nic_bandwidth * job.constants.push_nic
    if not job.shared:
        return moved / nic
    copies = 2 * received / (job.gpu.memory_bandwidth * job.constants.memory)  # read and written on the server's GPU
    links = job.gpu.link_bandwidth * job.constants.gather if num_ranks <= job.link_domain else nic
    return copies + moved * (1 - 1 / num_ranks) / links


def mapped_push(job: Job, num_bytes: int, gather_s: float) -> float:
    """Seconds of a push through buckets that servers on the trainer's GPUs map (transport `mapped`).

    Every rank gathers whole tensors into a bucket while servers load the one before, so the slower of the two counts.
    `gather_s`: of all tensors on every rank.  Rank 0 also reads all bytes once for their digests.  A server's GPU reads
    and writes its own part of each bucket; each bucket has a fixed cost.
    """
    memory = job.gpu.memory_bandwidth * job.constants.memory
    buckets = ceil(2 * num_bytes / job.bucket_bytes)
    fill_s = gather_s + num_bytes / memory
    load_s = 2 * num_bytes / job.server_gpus / memory + buckets * job.constants.bucket_s
    return max(fill_s, load_s) + min(fill_s, load_s) / buckets  # nothing hides the first bucket's filling


def tensors(job: Job) -> int:
    """Number of tensors, each with a fixed cost; in shards, the experts of a layer are sent stacked."""
    return sum(
        len(op.hf_shapes) * (op.expert[1] if op.expert and job.push == "gathered" else 1)
        for kind in kinds_of(job.actor.hf)
        for op in kind.ops
    )


def _gather(job: Job, num_bytes: int) -> float:
    """Seconds until every rank of a replica had all tensors whole, as in megarl/weights/hf/gather.py.

    Each rank first gets its own part of every pipeline stage, then the parts of the ranks that share a tensor or the
    experts of a layer.  Ranks of a group that are on one machine use the adapters of all of them.
    """
    gpu, layout = job.gpu, job.actor.layout
    links = Links(gpu.link_bandwidth * job.constants.gather, gpu.nic_bandwidth * job.constants.gather, job.link_domain)
    if job.actor.fsdp:
        return links.ring(num_bytes, job.actor.num_ranks)
    experts, expert_ranks = 2 * of_stage(job.actor.hf, Layout(), 0).experts, layout.ep * layout.expert_tp
    dense = num_bytes - experts
    of_stages = links.ring(dense / layout.tp + experts / expert_ranks, layout.pp, job.actor.num_ranks // layout.pp)
    return of_stages + links.ring(dense, layout.tp) + links.ring(experts, expert_ranks)


def onload_of_pass(job: Job, role: Role, held: Memory) -> float:
    """Seconds until offloaded weights are on the GPU for a pass that reads them; the host keeps its copy."""
    return _host_link(job, held.weights if role.param_offload else 0)


def offload_of_update(job: Job, role: Role, held: Memory, passes_s: float) -> float:
    """Seconds of offload for an update: once for all its steps, unless teachers' passes come between them.

    `passes_s`: of an optimizer step.
    """
    weights = held.weights if role.param_offload else 0
    state = held.optimizer if role.optimizer_offload else 0
    back = 0 if role.lora_rank else weights  # a frozen base is not copied back; adapters are small beside it
    once = _host_link(job, weights + back + state) + _waited(job, role, state, passes_s)
    return (job.optimizer_steps if job.reads_heads else 1) * once


def onload_of_push(job: Job, held: Memory) -> float:
    """Seconds until the actor's weights are on the GPU, if they are offloaded before a push."""
    return _host_link(job, held.weights if job.shared or job.actor.param_offload else 0)


def offload_of_turn(job: Job, role: Role, held: Memory, passes_s: float) -> float:
    """Seconds of offload of everything that stays on the GPU during the trainer's turn, with colocation.

    All of it comes; what an update writes is copied back.  `passes_s`: of an optimizer step.
    """
    if not job.shared:
        return 0.0
    weights = 0 if role.param_offload else held.weights
    state = 0 if role.optimizer_offload else held.optimizer
    back = weights if role.optimizer is not None and not role.lora_rank else 0
    return _host_link(job, weights + back + state) + _waited(job, role, state, passes_s)


def offload_of_servers(job: Job) -> float:
    """Seconds in which servers release their memory before the training and resume it afterwards."""
    return job.constants.sleep_s + job.constants.wake_s if job.shared else 0.0


def _waited(job: Job, role: Role, state: int, passes_s: float) -> float:
    """Seconds that an optimizer step waits for so many bytes of its state.

    They come beside its passes, all the time of which is assumed to hide them.  That is not measured, and may be too
    much: the passes' own inputs come by the same link, behind them.  With pipeline stages nothing is hidden: Megatron
    synchronizes the device with each exchange between them (p2p_communication.py:242,398 of megatron-core 0.16.1).
    """
    hidden = passes_s if role.layout.pp == 1 else 0.0
    return max(0.0, _host_link(job, state) - hidden)


def _host_link(job: Job, num_bytes: int) -> float:
    """Seconds for so many bytes between a GPU and its host."""
    return num_bytes / (job.gpu.host_bandwidth * job.constants.host)
