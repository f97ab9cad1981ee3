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
        products = self._dense(own, self.shape.layer_params(sparse))
        if sparse:
            products += self._experts(own)
        moved_s = self._moved(tokens, kept_numbers(self.role.hf, layout, sparse))
        least = c.expert_layer_s if sparse else c.layer_s
        forward = max(least, keys + products.forward + moved_s)
        backward = max(2 * least, 2.5 * keys + products.backward + 2 * moved_s)
        attention, feed_forward = self._sent(tokens, keys), self._passed(sparse, tokens)
        sent, sent_back = attention[0] + feed_forward[0], attention[1] + feed_forward[1]
        repeated, resent = 0.0, 0.0
        if self.role.recompute == "full":
            repeated, resent = forward, sent
        elif self.role.recompute == "selective":
            repeated, resent = self._repeated(sparse, tokens, keys, set(self.role.recompute_modules or ("core_attn",)))
        return Pass(forward + sent, backward + sent_back + repeated + resent, sent + sent_back + resent)

    def _repeated(self, sparse: bool, tokens: float, keys: float, modules: set[str]) -> tuple[float, float]:
        """Seconds to compute these modules of a layer once more, and the exposed communication of that.

        Communication is counted for `mlp` and `moe` alone.  Left out are the sends of a ring under context parallelism
        (`core_attn`), and under sequence parallelism the gathers before latents' up projections (`mla_up_proj`) and
        those around shared experts (`shared_experts`).
        """
        hf, layout, shape = self.role.hf, self.role.layout, self.shape
        own = tokens / (layout.cp * layout.tp)
        moved = kept_numbers(hf, layout, sparse) - kept_numbers(hf, layout, sparse, again=modules)
        seconds = self._moved(tokens, moved) + (keys if "core_attn" in modules else 0.0)
        if "mla_up_proj" in modules:
            seconds += self._dense(own, shape.up_params).forward
        if sparse and "moe" in modules:
            products, sent = self._dense(own, shape.shared_params) + self._experts(own), self._passed(sparse, tokens)[0]
        elif sparse and "shared_experts" in modules:
            products, sent = self._dense(own, shape.shared_params - shape.hidden * shape.num_experts), 0.0
        elif not sparse and "mlp" in modules:
            products, sent = self._dense(own, shape.dense_params), self._passed(sparse, tokens)[0]
        else:
            products, sent = Pass(), 0.0
        return seconds + products.forward, sent

    def _moved(self, tokens: float, numbers: int) -> float:
        """Seconds to read and write what a layer keeps."""
        return tokens / self.role.layout.cp * numbers * self.width * self.constants.touches / self.bandwidth

    def _dense(self, own: float, params: int) -> Pass:
        """Matrix products of a rank's `own` tokens with these parameters of a layer, which are no experts'."""
        return self._products(2 * own * params / (self.peak * self.constants.matmul), params / self.role.layout.tp)

    def _experts(self, own: float) -> Pass:
        c, layout, shape = self.constants, self.role.layout, self.shape
        seconds = 2 * own * shape.chosen_params * c.expert_imbalance / (self.peak * c.experts)
        return self._products(seconds, shape.expert_params / (layout.ep * layout.expert_tp))

    def _products(self, seconds: float, params: float) -> Pass:
        """Matrix products of `seconds` forward, or the time to read weights and accumulate gradients if longer."""
        learns = not self.role.lora_rank
        forward = params * self.width / self.bandwidth
        backward = forward + (params * 2 * 4 / self.bandwidth if learns else 0.0)
        return Pass(max(seconds, forward), max((2 if learns else 1) * seconds, backward))

    def _sent(self, tokens: float, keys: float) -> tuple[float, float]:
        """Exposed communication of attention, forward and backward.  keys: its seconds, which hide a ring's sends."""
        layout, links = self.role.layout, self.links
        forward, backward = self._passed(False, tokens)
        if layout.cp > 1:
            turn = tokens / layout.cp * self.shape.key_size / layout.tp * self.width
            ring = links.hop(turn * (layout.cp - 1), layout.tp * (layout.cp - 1))
            forward += max(0.0, ring - keys)
            backward += max(0.0, 2 * ring - 2.5 * keys)
        return forward, backward

    def _passed(self, sparse: bool, tokens: float) -> tuple[float, float]:
        """The same of a feed-forward, or of experts."""
        c, layout, links = self.constants, self.role.layout, self.links
        states = tokens / layout.cp * self.shape.hidden * self.width
        if not sparse:  # as attention it gathers and scatters; the backward pass gathers the inputs again
            one = links.ring(states, layout.tp) * c.tp_exposed
            return 2 * one, 3 * one
        chosen = self.shape.num_chosen
        own, once = states / layout.tp * c.expert_imbalance, self.job.dispatch == "once"
        there = links.exchange(own, layout.ep, layout.expert_tp, chosen, once=once) / c.all_to_all
        cut = links.ring(own * layout.expert_tp * chosen, layout.expert_tp) * c.tp_exposed
        return 2 * (there + cut), 2 * there + 3 * cut

    def _head(self, tokens: float) -> Pass:
        """Logits forward; backward the logits again and the gradients of both factors, or only the states' (LoRA)."""
        layout, c = self.role.layout, self.constants
        once = 2 * tokens / (layout.cp * layout.tp) * self.shape.head_params / (self.job.gpu.bf16_flops * c.head)
        return Pass(once, (2 if self.role.lora_rank else 3) * once)
