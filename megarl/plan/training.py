"""Time of a role's training in a step of the run, and of its forward-only passes.

A pass of a micro-batch in a pipeline stage is matrix products, memory traffic and communication of its layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from megarl.arch.layers import Experts, Mixer
from megarl.plan.adapters import trained
from megarl.plan.job import Job, Role
from megarl.plan.lengths import context_of, prefix_group_of
from megarl.plan.memory import MOMENTS, kept_numbers, kept_scores, part_of
from megarl.weights.count import Kind, Shape, forward_flops, kinds_of_stage, shape_of

UP = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")  # of latents: to queries, keys and values


@dataclass(frozen=True)
class Training:
    """The training of a role in a step of the run."""

    seconds: float
    passes_s: float  # of one optimizer step: its forward and backward passes
    mfu: float  # the model's operations, recomputation not counted, over the GPUs' peak in the same time
    bubble: float  # idle time of the pipeline over its working time: (pp - 1) / (micro-batches * vpp)
    micro_batches: int  # of each replica in an optimizer step
    work_s: float  # of all optimizer steps, as the next three: passes without the pipeline's idle time
    exposed_s: float  # within work_s: communication that nothing hides
    gradients_s: float
    optimizer_s: float


@dataclass(frozen=True)
class MicroBatches:
    """How a replica's sequences are split."""

    count: int
    tokens: float  # computed, per micro-batch


def training(job: Job, role: Role | None = None) -> Training:
    """All optimizer steps of a step of the run.  role None: the actor."""
    role = role or job.actor
    on_gpus, layout = RoleOnGpus(job, role), role.layout
    tokens = job.tokens * job.epochs / job.optimizer_steps
    context = context_of(job, prefix_group_of(job, role, tokens, role.max_tokens))
    cut = micro_batches(job, role, tokens, role.max_tokens)
    passes = stages(on_gpus, cut, context)
    turn = max(one.both for one in passes)
    work, idle = cut.count * turn, (layout.pp - 1) / layout.vpp * turn
    gradients = _gradients(on_gpus, cut, max(passes, key=lambda one: one.both))
    optimizer = _optimizer(on_gpus)
    passes_s = (work + idle) * job.constants.replica_imbalance
    steps = job.optimizer_steps
    seconds = (passes_s + gradients + optimizer) * steps
    times = 2 if role.lora_rank else 3  # frozen weights need no gradient
    flops = times * forward_flops(on_gpus.shape, computed(job, role, learns=True), context)
    return Training(
        seconds=seconds,
        passes_s=passes_s,
        mfu=flops / (seconds * role.num_ranks * job.gpu.bf16_flops),
        bubble=idle / work,
        micro_batches=cut.count,
        work_s=work * steps,
        exposed_s=cut.count * max(one.exposed for one in passes) * steps,
        gradients_s=gradients * steps,
        optimizer_s=optimizer * steps,
    )


def scoring(job: Job, role: Role | None = None) -> float:
    """Seconds of a forward pass over the sequences of a step: log-probs or values, without MTP layers."""
    role = replace(role or job.actor, mtp=0)
    on_gpus, layout = RoleOnGpus(job, role), role.layout
    cut = micro_batches(job, role, job.tokens, role.log_prob_tokens)
    context = context_of(job, prefix_group_of(job, role, job.tokens, role.log_prob_tokens))
    turn = max(one.forward for one in stages(on_gpus, cut, context))
    return (cut.count + (layout.pp - 1) / layout.vpp) * turn * job.constants.replica_imbalance


def computed(job: Job, role: Role, *, learns: bool) -> float:
    """Tokens that the role computes in its training, all epochs of it, or in a forward pass over a step's sequences."""
    tokens, limit = (job.tokens * job.epochs, role.max_tokens) if learns else (job.tokens, role.log_prob_tokens)
    together = tokens / job.optimizer_steps if learns else tokens
    return prefix_group_of(job, role, together, limit).computed(tokens, job)


def stages(on_gpus: RoleOnGpus, cut: MicroBatches, context: float) -> list[Pass]:
    """Time of a micro-batch on each pipeline stage, including its sends."""
    role = on_gpus.role
    layout = role.layout
    passes = [on_gpus.stage(stage, cut.tokens, context) for stage in range(layout.pp)]
    if layout.pp == 1:
        return passes
    split = layout.tp if layout.sequence_parallel else 1
    states = cut.tokens / layout.cp * on_gpus.shape.hidden * role.width / split
    hop = on_gpus.job.links.hop(states, role.num_ranks // layout.pp)
    hidden = 0.0 if layout.vpp > 1 else 1.0  # interleaved schedules overlap sends with computation
    return [one + Pass(hop * hidden, hop * hidden, 2 * hop * hidden) for one in passes]


def micro_batches(job: Job, role: Role, tokens: float, limit: int) -> MicroBatches:
    """The smallest number of equal micro-batches of a replica; `tokens` are those of all replicas' sequences.

    With an interleaved pipeline the number is a multiple of pp.
    """
    layout = role.layout
    group = prefix_group_of(job, role, tokens, limit)
    groups = max(1.0, tokens / job.mean_tokens / group.sequences / role.copies)
    fill = max(0.5, 1 - 0.25 * group.places / limit)  # groups are not split to fill the rest of a row
    count = max(1, ceil(groups * group.places / (limit * fill) - 1e-9))
    count = min(count, ceil(groups))
    if layout.vpp > 1:
        count = ceil(count / layout.pp) * layout.pp
    return MicroBatches(count, groups * group.places / count)


def _gradients(on_gpus: RoleOnGpus, cut: MicroBatches, slowest: Pass) -> float:
    """Seconds to reduce gradients and gather parameters that backward passes do not hide."""
    job, role, links = on_gpus.job, on_gpus.role, on_gpus.job.links
    layout = role.layout
    dense, experts = trained(role, 0)
    groups = (
        (dense, role.num_ranks // (layout.tp * layout.pp), layout.tp),
        (experts, role.num_ranks // (layout.ep * layout.expert_tp * layout.pp), layout.ep * layout.expert_tp),
    )
    gather = sum(links.ring(role.width * count, size, stride) for count, size, stride in groups)
    reduce = sum(links.ring(4 * count, size, stride) for count, size, stride in groups)
    if role.fsdp:  # parameters are gathered for each pass, gradients scattered for each micro-batch
        return max(0.0, cut.count * (2 * gather + reduce - slowest.both * job.constants.grad_hidden))
    if not layout.use_distributed_optimizer:
        gather = reduce
    hidden = slowest.backward * job.constants.grad_hidden if role.overlap_grad_reduce else 0.0
    return max(0.0, reduce - hidden) + gather


def _optimizer(on_gpus: RoleOnGpus) -> float:
    """Seconds of memory traffic: gradients, float32 copies and moments are read and generation, weights generation."""
    role, job = on_gpus.role, on_gpus.job
    parameters = trained(role, 0)
    is_shared = role.layout.use_distributed_optimizer or role.fsdp
    learnt = part_of(parameters, role.layout, role.num_ranks) if is_shared else parameters.total
    each = 4 + 2 * 4 * (MOMENTS[role.optimizer or "adamw"] + 1) + role.width
    if role.optimizer_on_host:  # gradients go there and weights come back; its memory is taken to be as fast: a guess
        return learnt * (each + 4 + 4) / job.gpu.host_bandwidth
    return learnt * each / (job.gpu.memory_bandwidth * job.constants.memory)


@dataclass(frozen=True)
class Pass:
    """Seconds of a micro-batch on a stage."""

    forward: float = 0.0
    backward: float = 0.0
    exposed: float = 0.0  # part of both: communication that is not hidden

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward, self.exposed + other.exposed)

    def times(self, count: int) -> Pass:
        return Pass(self.forward * count, self.backward * count, self.exposed * count)

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class RoleOnGpus:
    """A role on its GPUs: the time of a stage for a micro-batch."""

    job: Job
    role: Role

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.role.hf, self.role.name, self.role.mtp)

    @property
    def peak(self) -> float:
        """Peak FLOP/s of matrix products in the role's precision."""
        if self.role.dtype == "float32":
            return self.job.gpu.bf16_flops / 2
        return self.job.gpu.bf16_flops * (self.job.constants.fp8 if self.job.precision == "fp8" else 1)

    @property
    def bandwidth(self) -> float:
        """Reached memory bandwidth in B/s."""
        return self.job.gpu.memory_bandwidth * self.job.constants.memory

    def stage(self, stage: int, tokens: float, context: float) -> Pass:
        """tokens: of the micro-batch, over all context-parallel ranks; context: sum(l^2)/sum(l) of its sequences."""
        layout = self.role.layout
        total = Pass()
        for kind, count in kinds_of_stage(self.role.hf, layout, stage, self.role.mtp).items():
            total += self.layer(kind, tokens, context).times(count)
        return total + self._head(tokens) if stage == layout.pp - 1 else total

    def layer(self, kind: Kind, tokens: float, context: float) -> Pass:
        """One layer.  Kernels of layers with a state are taken to reach as much as attention's: a guess.  Matrices of
        an indexer are counted with a backward pass, which they lack: 2 % of the work of DeepSeek-V3.2's."""
        c, layout, mixer = self.job.constants, self.role.layout, kind.layer.mixer
        own = tokens / (layout.cp * layout.tp)  # a rank's share of the arithmetic
        of_keys = mixer.key_flops(context) * (1 + c.ring_turn * (layout.cp - 1))
        each = (of_keys, mixer.token_flops, mixer.choice_flops(context) * layout.tp)  # every rank has the whole indexer
        keys, mixed, chosen = (own * flops / (self.job.gpu.bf16_flops * c.attention) for flops in each)
        products = self._dense(own, kind.parameters().dense)
        if kind.layer.experts:
            products += self._experts(kind, own)
        scores = kept_scores(kind, layout, int(tokens), self.role.width)
        moved_s = self._moved(tokens, scores + kept_numbers(kind, self.shape.hidden, layout))
        least = (c.expert_layer_s if kind.layer.experts else c.layer_s) * kind.layer.halves / 2
        forward = max(least, keys + mixed + chosen + products.forward + moved_s)
        backward = max(2 * least, 2.5 * (keys + mixed) + products.backward + 2 * moved_s)
        attention = self._sent(kind, tokens, keys) if mixer != Mixer() else (0.0, 0.0)
        feed_forward = self._passed(kind.layer.experts, tokens) if kind.layer.feed_forward else (0.0, 0.0)
        sent, sent_back = attention[0] + feed_forward[0], attention[1] + feed_forward[1]
        repeated, resent = 0.0, 0.0
        if self.role.recompute == "full":
            repeated, resent = forward, sent
        elif self.role.recompute == "selective":
            repeated, resent = self._repeated(kind, tokens, keys, set(self.role.recompute_modules or ("core_attn",)))
        return Pass(forward + sent, backward + sent_back + repeated + resent, sent + sent_back + resent)

    def _repeated(self, kind: Kind, tokens: float, keys: float, modules: set[str]) -> tuple[float, float]:
        """Seconds to compute these modules of a layer once more, and the exposed communication of that.

        Communication is counted for `mlp` and `moe` alone.  Left out are the sends of a ring under context parallelism
        (`core_attn`), and under sequence parallelism the gathers before latents' up projections (`mla_up_proj`) and
        those around shared experts (`shared_experts`).
        """
        layout, hidden, experts = self.role.layout, self.shape.hidden, kind.layer.experts
        own = tokens / (layout.cp * layout.tp)
        moved = kept_numbers(kind, hidden, layout) - kept_numbers(kind, hidden, layout, again=modules)
        seconds = self._moved(tokens, moved) + (keys if "core_attn" in modules else 0.0)
        if "mla_up_proj" in modules:
            seconds += self._dense(own, kind.of(*UP)).forward
        if experts and "moe" in modules:
            products = self._dense(own, kind.of("mlp")) + self._experts(kind, own)
            sent = self._passed(experts, tokens)[0]
        elif experts and "shared_experts" in modules:
            products, sent = self._dense(own, kind.of("shared_experts")), 0.0
        elif not experts and "mlp" in modules:
            products, sent = self._dense(own, kind.of("mlp")), self._passed(None, tokens)[0]
        else:
            products, sent = Pass(), 0.0
        return seconds + products.forward, sent

    def _moved(self, tokens: float, numbers: int) -> float:
        """Seconds to read and write what a layer keeps."""
        return tokens / self.role.layout.cp * numbers * self.role.width * self.job.constants.touches / self.bandwidth

    def _dense(self, own: float, params: int) -> Pass:
        """Matrix products of a rank's `own` tokens with these parameters of a layer, which are no experts'."""
        return self._products(2 * own * params / (self.peak * self.job.constants.matmul), params / self.role.layout.tp)

    def _experts(self, kind: Kind, own: float) -> Pass:
        c, layout = self.job.constants, self.role.layout
        seconds = 2 * own * kind.chosen_params * c.expert_imbalance / (self.peak * c.experts)
        return self._products(seconds, kind.parameters().experts / (layout.ep * layout.expert_tp))

    def _products(self, seconds: float, params: float) -> Pass:
        """Matrix products of `seconds` forward, or the time to read weights and accumulate gradients if longer."""
        learns = not self.role.lora_rank
        forward = params * self.role.width / self.bandwidth
        backward = forward + (params * 2 * 4 / self.bandwidth if learns else 0.0)
        return Pass(max(seconds, forward), max((2 if learns else 1) * seconds, backward))

    def _sent(self, kind: Kind, tokens: float, keys: float) -> tuple[float, float]:
        """Exposed communication of attention, forward and backward.  keys: its seconds, which hide a ring's sends."""
        layout, links = self.role.layout, self.job.links
        forward, backward = self._passed(None, tokens)
        if layout.cp > 1:
            sent = tokens / layout.cp * kind.layer.mixer.sent(layout.tp, layout.cp) * self.role.width
            ring = links.hop(sent, layout.tp * (layout.cp - 1))
            forward += max(0.0, ring - keys)
            backward += max(0.0, 2 * ring - 2.5 * keys)
        return forward, backward

    def _passed(self, experts: Experts | None, tokens: float) -> tuple[float, float]:
        """The same of a feed-forward (None), or of experts."""
        c, layout, links = self.job.constants, self.role.layout, self.job.links
        states = tokens / layout.cp * self.shape.hidden * self.role.width
        if not experts:  # as attention it gathers and scatters; the backward pass gathers the inputs again
            one = links.ring(states, layout.tp) * c.tp_exposed
            return 2 * one, 3 * one
        chosen = experts.chosen
        own, once = states / layout.tp * c.expert_imbalance, self.job.dispatch == "once"
        own *= (experts.latent or self.shape.hidden) / self.shape.hidden
        there = links.exchange(own, layout.ep, layout.expert_tp, chosen, once=once) / c.all_to_all
        cut = links.ring(own * layout.expert_tp * chosen, layout.expert_tp) * c.tp_exposed
        return 2 * (there + cut), 2 * there + 3 * cut

    def _head(self, tokens: float) -> Pass:
        """Logits forward; backward the logits again and the gradients of both factors, or only the states' (LoRA)."""
        layout, c = self.role.layout, self.job.constants
        once = 2 * tokens / (layout.cp * layout.tp) * self.shape.head_params / (self.job.gpu.bf16_flops * c.head)
        return Pass(once, (2 if self.role.lora_rank else 3) * once)
