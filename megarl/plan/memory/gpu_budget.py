"""Peak memory of each kind of rank by part: in training, in a checkpoint save, in a push, and during generation.

A role without offload stays on the GPU while other roles work; its bytes count in their `others`.  With colocation the
whole trainer is offloaded during generation (megarl/trainer/roles.py: trainers_turn).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from megarl.layout import padded_vocab_size
from megarl.plan.job import Job, Role
from megarl.plan.memory import support
from megarl.plan.memory.adapters import with_adapters
from megarl.plan.memory.count import kinds_of_stage, num_experts, of_stage, whole
from megarl.plan.memory.memory import (
    RESERVE_BYTES,
    SERVER_BYTES,
    Memory,
    Work,
    communicator_bytes,
    of_push,
    of_stage_bytes,
)
from megarl.plan.time.constants import CONSTANTS, Constants
from megarl.plan.time.serving import Server

CHUNK_NUMBERS = 2**26  # logits in memory at the same time (megarl/mcore/logprobs/fused.py)
LOGIT_BYTES = 6  # a logit in float32, and its gradient in bfloat16
GpuBudget = dict[str, int]  # part -> bytes; `total` is the last


def gpu_budgets(job: Job, constants: Constants = CONSTANTS) -> dict[str, GpuBudget]:
    """Kind of rank -> its parts.  Stages with equal contents are one kind."""
    found = gpu_budgets_of_trainer(job)
    if job.num_servers:
        found["server"] = _server(job, constants)
    return found


def gpu_budgets_of_trainer(job: Job) -> dict[str, GpuBudget]:
    """The same without servers, whose memory depends on the type of GPU: every role, a save, a push."""
    found: dict[str, GpuBudget] = {}
    for role in job.roles:
        found |= _stages(job, role)
    if starts := [_start(job, role) for role in job.roles if role.optimizer and role.layout.use_distributed_optimizer]:
        found["start"] = max(starts, key=lambda budget: budget["total"])
    found["save"] = max((_save(job, role) for role in job.roles if role.optimizer), key=lambda budget: budget["total"])
    if job.num_servers:
        found["push"] = _push(job)
    return found


def local_totals(job: Job) -> dict[str, int]:
    """Kind of rank -> bytes with Megatron's local layers, of the kinds for which they differ.

    megatron.transformer_impl=auto takes these layers where Transformer-Engine is not installed.
    """
    critic, reference = (role and replace(role, local=True) for role in (job.critic, job.reference))
    teachers = tuple(replace(role, local=True) for role in job.teachers)
    local = replace(job, local=True, critic=critic, reference=reference, teachers=teachers)
    planned, found = gpu_budgets_of_trainer(job), gpu_budgets_of_trainer(local)
    return {kind: budget["total"] for kind, budget in found.items() if budget["total"] != planned[kind]["total"]}


def work_of(role: Role) -> Work:
    """The role's inputs for the rule in memory.py."""
    return Work(
        num_ranks=role.num_ranks,
        max_tokens=role.max_tokens if role.optimizer else role.log_prob_tokens,
        recompute=role.recompute == "full",
        recompute_modules=role.recompute_modules if role.recompute == "selective" else (),
        dtype=role.dtype,
        optimizer=role.optimizer,
        fsdp=role.fsdp,
        on_host=role.optimizer_on_host,
        local=role.local,
    )


def held(role: Role, stage: int) -> Memory:
    """Memory on a GPU of a pipeline stage while the role works."""
    memory = of_stage_bytes(role.hf, role.layout, stage, work_of(role), role.name)
    return with_adapters(memory, role, stage) if role.lora_rank else memory


def fullest(role: Role) -> Memory:
    """Memory of the role's largest stage."""
    return max((held(role, stage) for stage in range(role.layout.pp)), key=lambda memory: memory.total)


def _stages(job: Job, role: Role) -> dict[str, GpuBudget]:
    layout, found, first = role.layout, {}, 0
    kinds = [
        (of_stage(role.hf, layout, stage, role.name), kinds_of_stage(role.hf, layout, stage))
        for stage in range(layout.pp)
    ]
    for _, alike in groupby(kinds):
        last = first + len(list(alike)) - 1
        memory = max((held(role, stage) for stage in range(first, last + 1)), key=lambda memory: memory.total)
        name = f"{role.name}" if layout.pp == 1 else f"{role.name} stage {first}" + (f"-{last}" if last > first else "")
        found[name] = _room(job, role, memory, is_last=last == layout.pp - 1)
        first = last + 1
    return found


def _room(job: Job, role: Role, memory: Memory, *, is_last: bool) -> GpuBudget:
    chunk = drawn = 0
    if is_last and role.name != "critic":
        rows = role.hf["vocab_size"] // role.layout.tp
        numbers = min(CHUNK_NUMBERS, rows * role.max_tokens // role.layout.cp)
        chunk = LOGIT_BYTES * numbers
        if job.most_drawn:
            drawn = support.gpu_bytes(job, role) + numbers  # a byte for each logit: whether it is excluded
    return summed(
        weights=memory.weights,
        gradients=memory.gradients,
        optimizer=memory.optimizer,
        activations=memory.activations,
        gathered=memory.gathered,
        log_prob_chunk=chunk + drawn,
        teacher_heads=_heads(job) if is_last and role.name == "actor" else 0,
        others=_resident(job, role),
        communicators=_communicators(role),
        reserve=memory.reserve - chunk,
    )


def _communicators(role: Role) -> int:
    return communicator_bytes(role.layout, role.num_ranks, has_experts=bool(num_experts(role.hf)))


def _start(job: Job, role: Role) -> GpuBudget:
    """Megatron wraps the model: its weights move into a buffer, and the buffer of gradients is there already."""
    memory = fullest(role)
    return summed(
        weights=2 * memory.weights,
        gradients=memory.gradients,
        others=_resident(job, role),
        communicators=_communicators(role),
        reserve=memory.reserve,
    )


def _heads(job: Job) -> int:
    """Bytes of the teachers' heads, cut as the actor's own and in its type, during an optimizer step."""
    rows = padded_vocab_size(job.hf["vocab_size"], job.layout.tp) // job.layout.tp
    width = 4 if job.dtype == "float32" else 2
    return rows * width * sum(teacher.hf["hidden_size"] for teacher in job.teachers) if job.reads_heads else 0


def _resident(job: Job, working: Role) -> int:
    """Bytes of other roles that stay on the GPU while this role works."""
    total = 0
    for role in job.roles:
        if overlap(role, working) and role.name != working.name:
            total += _staying(role, fullest(role))
    return total


def overlap(one: Role, other: Role) -> bool:
    """Whether two roles share ranks."""
    return one.first_rank < other.first_rank + other.num_ranks and other.first_rank < one.first_rank + one.num_ranks


def _staying(role: Role, memory: Memory) -> int:
    """Bytes that are not offloaded to host memory after a call."""
    return (0 if role.param_offload else memory.weights + memory.gradients) + (
        0 if role.optimizer_offload else memory.optimizer
    )


def _push(job: Job) -> GpuBudget:
    """The actor's weights are onloaded; with colocation, the rest of the trainer is offloaded and the server's
    weights are on the same GPU."""
    role = job.actor
    stage = max(range(role.layout.pp), key=lambda at: of_stage(role.hf, role.layout, at).total)
    server_bytes = Server(job, CONSTANTS).weight_bytes
    parts = of_push(role.hf, role.layout, stage, work_of(role), server_bytes, job.bucket_bytes)
    memory = held(role, stage)
    stays = _resident(job, role) + _staying(role, memory) - (0 if role.param_offload else memory.weights)
    return summed(
        weights=parts.weights,
        server_weights=parts.server if job.shared else 0,
        push_bucket=parts.bucket,
        others=0 if job.shared else stays,
        reserve=parts.reserve,
    )


def _save(job: Job, role: Role) -> GpuBudget:
    """Weights and optimizer are onloaded; each rank copies its own share to host memory, tensor by tensor.

    With fsdp the weights are unsharded meanwhile, as in a push.
    """
    memory = fullest(role)
    return summed(
        weights=memory.weights,
        gradients=0 if role.param_offload else memory.gradients,
        optimizer=memory.optimizer,
        gathered=(4 if role.dtype == "float32" else 2) * whole(role.hf, role.name) if role.fsdp else 0,
        others=_resident(job, role),
        reserve=memory.reserve,
    )


def _server(job: Job, constants: Constants) -> GpuBudget:
    server = Server(job, constants)
    reserve = SERVER_BYTES + (RESERVE_BYTES if job.shared else 0)
    return summed(
        weights=server.weight_bytes, adapters=server.adapter_bytes, kv_cache=server.cache_bytes, reserve=reserve
    )


def summed(**parts: int) -> GpuBudget:
    """Parts that are not 0, and their sum."""
    return {name: size for name, size in parts.items() if size} | {"total": sum(parts.values())}
