"""Peak memory of each kind of rank by part: in training, in a checkpoint save, in a push, and during generation.

A role without offload stays on the GPU while other roles work; its bytes count in their `others`.  With colocation the
whole trainer is offloaded during generation (megarl/trainer/roles.py: training_phase).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from megarl.arch.layout import numbers_of, padded_vocab_size
from megarl.plan.job import Job, Role
from megarl.plan.memory import (
    RESERVE_BYTES,
    SERVER_BYTES,
    Memory,
    communicator_bytes,
    fullest,
    of_stage_bytes,
    push_bucket_bytes,
)
from megarl.plan.serving import Server
from megarl.weights.count import kinds_of_stage, of_stage, whole

CHUNK_NUMBERS = 2**26  # logits in memory at the same time (megarl/mcore/logprobs/fused.py)
CHUNK_IDS = 2**22  # ids of a chunk's tokens (the same file)
ID_BYTES = 4  # of an id that could be drawn, and of the number of ids of a token
INDEX_BYTES = 40  # of each id of a chunk's tokens (megarl/mcore/logprobs/support.py)
LOGIT_BYTES = 6  # a logit in float32, and its gradient in bfloat16
GpuBudget = dict[str, int]  # part -> bytes; `total` is the last


def gpu_budgets(job: Job) -> dict[str, GpuBudget]:
    """Kind of rank -> its parts.  Stages with equal contents are one kind."""
    budgets = gpu_budgets_of_trainer(job)
    if job.num_servers:
        budgets["server"] = _server(job)
    return budgets


def gpu_budgets_of_trainer(job: Job) -> dict[str, GpuBudget]:
    """The same without servers, whose memory depends on the type of GPU: every role, a save, a push."""
    budgets: dict[str, GpuBudget] = {}
    for role in job.roles:
        budgets |= _stages(job, role)
    if starts := [_start(job, role) for role in job.roles if role.optimizer and role.layout.use_distributed_optimizer]:
        budgets["start"] = max(starts, key=lambda budget: budget["total"])
    saves = [_save(job, role) for role in job.roles if role.optimizer]
    budgets["save"] = max(saves, key=lambda budget: budget["total"])
    if job.num_servers:
        budgets["push"] = _push(job)
    return budgets


def local_totals(job: Job) -> dict[str, int]:
    """Kind of rank -> bytes with Megatron's local layers, of the kinds for which they differ.

    megatron.transformer_impl=auto takes these layers where Transformer-Engine is not installed.
    """
    critic, reference = (role and replace(role, local=True) for role in (job.critic, job.reference))
    actor, *teachers = (replace(role, local=True) for role in (job.actor, *job.teachers))
    local = replace(job, actor=actor, critic=critic, reference=reference, teachers=tuple(teachers))
    planned, with_local = gpu_budgets_of_trainer(job), gpu_budgets_of_trainer(local)
    return {kind: budget["total"] for kind, budget in with_local.items() if budget["total"] != planned[kind]["total"]}


@dataclass(frozen=True)
class Stages:
    """Consecutive pipeline stages whose ranks have equal numbers of layers and parameters."""

    first: int
    last: int
    layers: int
    parameters: int

    @property
    def name(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def equal_stages(role: Role) -> list[Stages]:
    """The stages of a role, equal ones together."""
    hf, layout, mtp = role.hf, role.layout, role.mtp
    here = range(layout.pp)
    contents = [(kinds_of_stage(hf, layout, at, mtp), of_stage(hf, layout, at, role.name, mtp)) for at in here]
    stages, first = [], 0
    for (kinds, parameters), alike in groupby(contents):
        last = first + len(list(alike)) - 1
        stages.append(Stages(first, last, sum(kinds.values()), parameters.total))
        first = last + 1
    return stages


def _stages(job: Job, role: Role) -> dict[str, GpuBudget]:
    budgets = {}
    for stages in equal_stages(role):
        each = (of_stage_bytes(role, stage) for stage in range(stages.first, stages.last + 1))
        memory = max(each, key=lambda memory: memory.total)
        name = role.name if role.layout.pp == 1 else f"{role.name} stage {stages.name}"
        budgets[name] = _room(job, role, memory, is_last=stages.last == role.layout.pp - 1)
    return budgets


def _room(job: Job, role: Role, memory: Memory, *, is_last: bool) -> GpuBudget:
    chunk = drawn = 0
    if is_last and role.name != "critic":
        rows = role.hf["vocab_size"] // role.layout.tp
        numbers = min(CHUNK_NUMBERS, rows * role.max_tokens // role.layout.cp)
        chunk = LOGIT_BYTES * numbers
        if job.most_drawn:
            drawn = _support_bytes(job, role) + numbers  # a byte for each logit: whether it is excluded
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


def _support_bytes(job: Job, role: Role) -> int:
    """Sampling-mask replay: the ids of one micro-batch that could be drawn, and where those of a chunk's tokens are."""
    ids = role.max_tokens * job.most_drawn
    return ids * ID_BYTES + min(ids, CHUNK_IDS) * INDEX_BYTES


def _communicators(role: Role) -> int:
    return communicator_bytes(role.layout, role.num_ranks, has_experts=bool(numbers_of(role.hf).num_experts))


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
    rows = padded_vocab_size(job.actor.hf["vocab_size"], job.actor.layout.tp) // job.actor.layout.tp
    return rows * job.actor.width * sum(teacher.hf["hidden_size"] for teacher in job.teachers) if job.reads_heads else 0


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
    weights are on the same GPU.  With fsdp, too, the whole stage counts: a push unshards the parameters that it reads.
    """
    role = job.actor
    held = [of_stage(role.hf, role.layout, at, mtp=role.mtp).total for at in range(role.layout.pp)]
    memory = of_stage_bytes(role, held.index(max(held)))
    stays = _resident(job, role) + _staying(role, memory) - (0 if role.param_offload else memory.weights)
    return summed(
        weights=role.width * max(held),
        server_weights=Server(job).weight_bytes if job.shared else 0,
        push_bucket=push_bucket_bytes(role, job.bucket_bytes),
        others=0 if job.shared else stays,
        reserve=RESERVE_BYTES,
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
        gathered=role.width * whole(role.hf, role.name) if role.fsdp else 0,
        others=_resident(job, role),
        reserve=memory.reserve,
    )


def _server(job: Job) -> GpuBudget:
    server = Server(job)
    reserve = SERVER_BYTES + (RESERVE_BYTES if job.shared else 0)
    return summed(
        weights=server.weight_bytes,
        adapters=server.adapter_bytes,
        kv_cache=server.cache_bytes,
        states=server.pool_bytes,
        reserve=reserve,
    )


def summed(**parts: int) -> GpuBudget:
    """Parts that are not 0, and their sum."""
    return {name: size for name, size in parts.items() if size} | {"total": sum(parts.values())}
