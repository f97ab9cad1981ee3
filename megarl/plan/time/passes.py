"""Time of a micro-batch in a pipeline stage: matrix products, memory traffic and communication of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megarl.plan.job import Job, Role
from megarl.plan.memory.count import kinds_of_stage
from megarl.plan.memory.memory import kept_numbers
from megarl.plan.time.constants import Constants
from megarl.plan.time.flops import Shape, shape_of
from megarl.plan.time.links import Links


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
class Machine:
    """A role on its GPUs: the time of a stage for a micro-batch."""

    job: Job
    role: Role
    constants: Constants

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.role.hf, self.role.name)

    @cached_property
    def links(self) -> Links:
        return Links.of(self.job.gpu, self.job.link_domain, self.constants)

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return 4 if self.role.dtype == "float32" else 2

    @property
    def peak(self) -> float:
        """Peak FLOP/s of matrix products in the role's precision."""
        if self.role.dtype == "float32":
            return self.job.gpu.bf16_flops / 2
        return self.job.gpu.bf16_flops * (self.constants.fp8 if self.job.precision == "fp8" else 1)

    @property
    def bandwidth(self) -> float:
        """Reached memory bandwidth in B/s."""
        return self.job.gpu.memory_bandwidth * self.constants.memory

    def stage(self, stage: int, tokens: float, context: float) -> Pass:
        """tokens: of the micro-batch, over all context-parallel ranks; context: sum(l^2)/sum(l) of its sequences."""
        layout = self.role.layout
        total = Pass()
        for sparse, count in kinds_of_stage(self.role.hf, layout, stage).items():
            total += self.layer(sparse, tokens, context).times(count)
        return total + self._head(tokens) if stage == layout.pp - 1 else total

    def layer(self, sparse: bool, tokens: float, context: float) -> Pass:
        """One layer, with experts or without."""
        c, layout = self.constants, self.role.layout
        own = tokens / (layout.cp * layout.tp)  # a rank's share of the arithmetic
        keys = own * self.shape.key_flops * context / 2 / (self.job.gpu.bf16_flops * c.attention)
        keys *= 1 + c.ring_turn * (layout.cp - 1)
        params = self.shape.layer_params(sparse)
        products = self._products(2 * own * params / (self.peak * c.matmul), params / layout.tp)
        if sparse:
            seconds = 2 * own * self.shape.chosen_params * c.expert_imbalance / (self.peak * c.experts)
            products += self._products(seconds, self.shape.expert_params / (layout.ep * layout.expert_tp))
        moved = tokens / layout.cp * kept_numbers(self.role.hf, layout, sparse) * self.width * c.touches
        moved_s = moved / self.bandwidth
        least = c.expert_layer_s if sparse else c.layer_s
        forward = max(least, keys + products.forward + moved_s)
        backward = max(2 * least, 2.5 * keys + products.backward + 2 * moved_s)
        sent, sent_back = self._sent(sparse, tokens, keys)
        again = {"full": forward + sent, "selective": keys}.get(self.role.recompute, 0.0)
        exposed = sent + sent_back + (sent if self.role.recompute == "full" else 0.0)
        return Pass(forward + sent, backward + sent_back + again, exposed)

    def _products(self, seconds: float, params: float) -> Pass:
        """Matrix products of `seconds` forward, or the time to read weights and accumulate gradients if longer."""
        learns = not self.role.lora_rank
        forward = params * self.width / self.bandwidth
        backward = forward + (params * 2 * 4 / self.bandwidth if learns else 0.0)
        return Pass(max(seconds, forward), max((2 if learns else 1) * seconds, backward))

    def _sent(self, sparse: bool, tokens: float, keys: float) -> tuple[float, float]:
        """Exposed communication, forward and backward.  keys: seconds of attention, which hide a ring's sends."""
        c, layout, links = self.constants, self.role.layout, self.links
        states = tokens / layout.cp * self.shape.hidden * self.width
        # attention and a dense feed-forward each gather and scatter; the backward pass gathers the inputs again
        one = links.ring(states, layout.tp) * c.tp_exposed
        parts = 1 if sparse else 2
        forward, backward = 2 * parts * one, 3 * parts * one
        if sparse:
            chosen = self.shape.num_chosen
            own, once = states / layout.tp * c.expert_imbalance, self.job.dispatch == "once"
            there = links.exchange(own, layout.ep, layout.expert_tp, chosen, once=once) / c.all_to_all
            cut = links.ring(own * layout.expert_tp * chosen, layout.expert_tp) * c.tp_exposed
            forward, backward = forward + 2 * (there + cut), backward + 2 * there + 3 * cut
        if layout.cp > 1:
            turn = tokens / layout.cp * self.shape.key_size / layout.tp * self.width
            ring = links.hop(turn * (layout.cp - 1), layout.tp * (layout.cp - 1))
            forward += max(0.0, ring - keys)
            backward += max(0.0, 2 * ring - 2.5 * keys)
        return forward, backward

    def _head(self, tokens: float) -> Pass:
        """Logits forward; backward the logits again and the gradients of both factors, or only the states' (LoRA)."""
        layout, c = self.role.layout, self.constants
        once = 2 * tokens / (layout.cp * layout.tp) * self.shape.head_params / (self.job.gpu.bf16_flops * c.head)
        return Pass(once, (2 if self.role.lora_rank else 3) * once)
