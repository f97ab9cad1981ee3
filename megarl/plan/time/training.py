"""Time of a role's training in a step of the run, and of its forward-only passes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megarl.plan.job import Job, Role
from megarl.plan.memory.adapters import trained
from megarl.plan.memory.memory import MOMENTS, part_of
from megarl.plan.time.constants import CONSTANTS, Constants
from megarl.plan.time.flops import forward_flops
from megarl.plan.time.lengths import context_of, family_of
from megarl.plan.time.passes import Machine, Pass


@dataclass(frozen=True)
class Training:
    """The training of a role in a step of the run."""

    seconds: float
    passes_s: float  # of one optimizer step: its forward and backward passes
    mfu: float  # the model's operations, recomputation not counted, over the GPUs' peak in the same time
    bubble: float  # idle time of the pipeline over its working time: (pp - 1) / (micro-batches * vpp)
    micro_batches: int  # of each replica in an optimizer step
    parts: dict[str, float]  # seconds: work, bubble, exposed (within work), gradients, optimizer


@dataclass(frozen=True)
class Cut:
    """The split of a replica's sequences into micro-batches."""

    count: int
    tokens: float  # computed, per micro-batch


def training(job: Job, role: Role | None = None, constants: Constants = CONSTANTS) -> Training:
    """All optimizer steps of a step of the run.  role None: the actor."""
    role = role or job.actor
    machine, layout = Machine(job, role, constants), role.layout
    tokens = job.tokens * job.epochs / job.optimizer_steps
    context = context_of(job, constants, family_of(job, role, tokens, role.max_tokens))
    cut = micro_batches(job, role, tokens, role.max_tokens)
    passes = stages(machine, cut, context)
    turn = max(one.both for one in passes)
    work, idle = cut.count * turn, (layout.pp - 1) / layout.vpp * turn
    gradients = _gradients(machine, cut, max(passes, key=lambda one: one.both))
    optimizer = _optimizer(machine)
    passes_s = (work + idle) * constants.replica_imbalance
    steps = job.optimizer_steps
    seconds = (passes_s + gradients + optimizer) * steps
    times = 2 if role.lora_rank else 3  # frozen weights need no gradient
    flops = times * forward_flops(machine.shape, computed(job, role, learns=True), context)
    parts = {
        "work": work * steps,
        "bubble": idle * steps,
        "exposed": cut.count * max(one.exposed for one in passes) * steps,
        "gradients": gradients * steps,
        "optimizer": optimizer * steps,
    }
    mfu = flops / (seconds * role.num_ranks * job.gpu.bf16_flops)
    return Training(seconds, passes_s, mfu, idle / work, cut.count, parts)


def scoring(job: Job, role: Role | None = None, constants: Constants = CONSTANTS) -> float:
    """Seconds of a forward pass over the sequences of a step: log-probs or values."""
    role = role or job.actor
    machine, layout = Machine(job, role, constants), role.layout
    cut = micro_batches(job, role, job.tokens, role.log_prob_tokens)
    context = context_of(job, constants, family_of(job, role, job.tokens, role.log_prob_tokens))
    turn = max(one.forward for one in stages(machine, cut, context))
    return (cut.count + (layout.pp - 1) / layout.vpp) * turn * constants.replica_imbalance


def computed(job: Job, role: Role, *, learns: bool) -> float:
    """Tokens that the role computes in its training, all epochs of it, or in a forward pass over a step's sequences."""
    tokens, limit = (job.tokens * job.epochs, role.max_tokens) if learns else (job.tokens, role.log_prob_tokens)
    together = tokens / job.optimizer_steps if learns else tokens
    return family_of(job, role, together, limit).computed(tokens, job)


def stages(machine: Machine, cut: Cut, context: float) -> list[Pass]:
    """Time of a micro-batch on each pipeline stage, including its sends."""
    role = machine.role
    layout = role.layout
    found = [machine.stage(stage, cut.tokens, context) for stage in range(layout.pp)]
    if layout.pp == 1:
        return found
    split = layout.tp if layout.sequence_parallel else 1
    states = cut.tokens / layout.cp * machine.shape.hidden * machine.width / split
    hop = machine.links.hop(states, role.num_ranks // layout.pp)
    hidden = 0.0 if layout.vpp > 1 else 1.0  # interleaved schedules overlap sends with computation
    return [one + Pass(hop * hidden, hop * hidden, 2 * hop * hidden) for one in found]


def micro_batches(job: Job, role: Role, tokens: float, limit: int) -> Cut:
    """The smallest number of equal micro-batches of a replica; `tokens` are those of all replicas' sequences.

    With an interleaved pipeline the number is a multiple of pp.
    """
    layout = role.layout
    family = family_of(job, role, tokens, limit)
    families = max(1.0, tokens / job.mean_tokens / family.sequences / role.copies)
    fill = max(0.5, 1 - 0.25 * family.places / limit)  # families are not split to fill the rest of a row
    count = max(1, ceil(families * family.places / (limit * fill) - 1e-9))
    count = min(count, ceil(families))
    if layout.vpp > 1:
        count = ceil(count / layout.pp) * layout.pp
    return Cut(count, families * family.places / count)


def _gradients(machine: Machine, cut: Cut, slowest: Pass) -> float:
    """Seconds to reduce gradients and gather parameters that backward passes do not hide."""
    role, links, constants = machine.role, machine.links, machine.constants
    layout = role.layout
    dense, experts = trained(role, 0)
    groups = (
        (dense, role.num_ranks // (layout.tp * layout.pp), layout.tp),
        (experts, role.num_ranks // (layout.ep * layout.expert_tp * layout.pp), layout.ep * layout.expert_tp),
    )
    gather = sum(links.ring(machine.width * count, size, stride) for count, size, stride in groups)
    reduce = sum(links.ring(4 * count, size, stride) for count, size, stride in groups)
    if role.fsdp:  # parameters are gathered for each pass, gradients scattered for each micro-batch
        return max(0.0, cut.count * (2 * gather + reduce - slowest.both * constants.grad_hidden))
    if not layout.use_distributed_optimizer:
        gather = reduce
    hidden = slowest.backward * constants.grad_hidden if role.overlap_grad_reduce else 0.0
    return max(0.0, reduce - hidden) + gather


def _optimizer(machine: Machine) -> float:
    """Seconds of memory traffic: gradients, float32 copies and moments are read and written, weights written."""
    role, job, constants = machine.role, machine.job, machine.constants
    parameters = trained(role, 0)
    is_shared = role.layout.use_distributed_optimizer or role.fsdp
    learnt = part_of(parameters, role.layout, role.num_ranks) if is_shared else parameters.total
    each = 4 + 2 * 4 * (MOMENTS[role.optimizer or "adamw"] + 1) + machine.width
    if role.optimizer_on_host:  # gradients go there and weights come back; its memory is taken to be as fast: a guess
        return learnt * (each + 4 + 4) / job.gpu.host_bandwidth
    return learnt * each / (job.gpu.memory_bandwidth * constants.memory)
