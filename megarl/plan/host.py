"""Memory of one machine: of a host with GPUs, and of a run on CPUs alone.

On a host with GPUs roles offload to it, and checkpoints that are being written, replays and what teachers return are
copied there.  Not counted: Python's processes, servers (except routing replay), rewards, and the file system's cache.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.arch.layout import Layout
from megarl.arch.routed_experts import RoutedExperts
from megarl.plan.adapters import of_adapters
from megarl.plan.gpu_budget import ID_BYTES, GpuBudget, fullest, summed
from megarl.plan.job import Job, Role
from megarl.plan.memory import MOMENTS
from megarl.plan.serving import Server
from megarl.weights.count import whole

COPIES = 4  # of a batch in training at most: its samples, the whole, an optimizer step's part, and its messages
STEP_COPIES = 3  # of an optimizer step in the driver: the whole, its parts for the replicas, and their messages
RANK_COPIES = 2  # on a rank: what it received, and the same as micro-batches
SGLANG_BYTES = 4  # of an expert's number; SGLang keeps one for every layer, also for those without experts
LIKELY_BYTES = 8  # of a likely token: its id in int32, its log-prob in float32
PROCESS_BYTES = 200 * 10**6  # a rank, a server, a collector or the driver, without tensors: forks measured 100 to 240
NUM_PROCESSES = 3  # the driver, a collector, and the process from which ranks are forked


def host_budget(job: Job) -> GpuBudget:
    """Bytes of the fullest machine by part, among those of the trainer and those of separate servers."""
    budgets = [_budget_of_machine(job, role) for role in job.roles]
    if not job.shared:
        budgets.append(summed(server_routes=routes_per_machine(job)))
    return max(budgets, key=lambda budget: budget["total"])


def saved_bytes(role: Role) -> int:
    """Bytes of a checkpoint of the role, or of its adapters alone: weights, float32 master weights and moments."""
    if role.lora_rank:
        count = of_adapters(role.hf, Layout(), 0, role.lora_rank, role.lora_targets).total
    else:
        count = whole(role.hf, role.name, role.mtp)
    return count * (role.width + 4 * MOMENTS[role.optimizer or "adamw"] + (0 if role.width == 4 else 4))


def _budget_of_machine(job: Job, role: Role) -> GpuBudget:
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
            of_teachers += ranks * teaching_per_rank(job)
    has_driver = first == 0
    return summed(
        weights=weights,
        optimizer=optimizer,
        save_copies=copies,
        routes=routes_in_driver(job) if has_driver else 0,
        server_routes=routes_per_machine(job) if job.shared else 0,
        support=supports_in_driver(job) if has_driver else 0,
        taught=of_teachers + (teaching_in_driver(job) if has_driver else 0),
    )


# ---- routing replay: the experts of every token.  GPUs hold only those of the micro-batches in flight, which is far
# below the reserve of memory.py.


def routes_in_driver(job: Job) -> int:
    """Of the batch in training, and of what is generated ahead of it."""
    routed = RoutedExperts.of(job.actor.hf)
    if job.router_replay == "off" or routed is None:
        return 0
    ahead = job.ahead if job.router_replay == "rollout" else 0
    return int(job.tokens * (COPIES + ahead)) * routed.bytes_per_token


def routes_per_server_gpu(job: Job) -> int:
    """Pinned memory for every token of the GPU's KV cache: SGLang keeps all of it on each rank."""
    routed = RoutedExperts.of(job.actor.hf)
    if job.router_replay != "rollout" or routed is None or not job.num_servers or not job.pins_routes:
        return 0
    server = Server(job)
    return int(server.cache_bytes / server.token_bytes) * routed.num_layers * routed.chosen * SGLANG_BYTES


def routes_per_machine(job: Job) -> int:
    """Of the servers on one machine."""
    num_servers = max(1, min(job.num_servers, job.gpus_per_node // job.server_gpus))
    return num_servers * min(job.server_gpus, job.gpus_per_node) * routes_per_server_gpu(job)


# ---- sampling-mask replay: for each generated token the ids that could be drawn.  An upper limit, because top-p may
# leave fewer than top-k; ties at the cutoff, which add a few, are not counted.


def supports_in_driver(job: Job) -> int:
    """Of the batch in training, and of what is generated ahead of it.

    The batch has as many places for each of its tokens, prompts included, as the fullest sequence needs (ragged.py):
    with long answers and one sequence of full supports, `most_drawn`.
    """
    if not job.most_drawn:
        return 0
    places, lists = job.tokens * job.most_drawn, job.sequences * job.response_tokens * job.most_drawn
    return int(places * COPIES + lists * job.ahead + job.tokens * (COPIES + job.ahead)) * ID_BYTES


# ---- what teachers return for each token, on its way to the actor's ranks: hidden states, or likeliest tokens.  Hidden
# states are sent one optimizer step at a time.  A rank has those of all tokens of its replica, on every stage.


def teaching_in_driver(job: Job) -> int:
    """Of the batch in training; hidden states only of an optimizer step."""
    if job.reads_heads:
        return int(_step_tokens(job) * _state_bytes(job)) * STEP_COPIES
    return int(job.tokens * job.teacher_top_k) * LIKELY_BYTES * COPIES


def teaching_per_rank(job: Job) -> int:
    """Of a rank of the actor."""
    replicas = job.actor.layout.data_parallel_size(job.actor.num_ranks)
    each = _state_bytes(job) if job.reads_heads else job.teacher_top_k * LIKELY_BYTES
    return int(_step_tokens(job) / replicas * each) * RANK_COPIES


def _step_tokens(job: Job) -> float:
    return job.tokens * min(1.0, job.mini_batch / job.prompts)


def _state_bytes(job: Job) -> int:
    """Of a token: a state of the widest teacher, in the type of the models."""
    return max(teacher.hf["hidden_size"] for teacher in job.teachers) * job.actor.width


# ---- a run on the CPUs of one machine, which ranks, servers and the run's own processes share


def cpu_budget(job: Job) -> GpuBudget:
    """Part -> bytes, at the moment when the role with the largest activations works; `total` is the last.

    Nothing is offloaded on a CPU, so every role's weights, gradients and moments stay.  Servers of the hf engine
    have a copy of the weights, and a KV cache of all that runs at a time.  No micro-batch is larger than a step.
    """
    most = job.prompts * job.n * job.longest if job.num_servers else 2**62
    held = [(role, fullest(replace(role, max_tokens=min(role.max_tokens, most)))) for role in job.roles]
    ranks = max(role.first_rank + role.num_ranks for role, _ in held)
    server = Server(replace(job, cache_width=job.actor.width))
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
    tokens = job.prompts * job.n * job.longest * (job.num_servers > 0)
    return tokens if job.max_total_tokens is None else min(tokens, job.num_servers * job.max_total_tokens)
