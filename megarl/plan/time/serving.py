"""Time in which servers generate the completions of a step.

A decode step generates a token of each running completion.  It reads the weights, or computes with them if that takes
longer, and reads the KV cache of all running completions.  If the server is full, completions wait; when none waits any
more, the number of running ones falls with the tail of their lengths (`lengths.py`).  With prefetch there are always
waiting completions, and no tail.  Expert parallelism inside a server has no effect on the predicted time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megarl.plan.job import Job
from megarl.plan.memory.count import whole
from megarl.plan.time.constants import CONSTANTS, Constants
from megarl.plan.time.flops import Shape, shape_of
from megarl.plan.time.lengths import context_of_writing, running, tail_of
from megarl.plan.time.links import Links

POINTS = 12  # of the tail, at which the speed is computed


@dataclass(frozen=True)
class Rollout:
    """One step of the run."""

    seconds: float
    prefill: float  # part of seconds: prefill of prompts
    tail: float  # part of seconds: after the last waiting completion has started
    concurrency: float  # concurrent completions of a full server
    step_s: float  # decode step of a full server
    bound: str  # cache | requests | work: the limit of the concurrency


NOTHING = Rollout(0.0, 0.0, 0.0, 0.0, 0.0, "work")  # for the time of a step without generation


@dataclass(frozen=True)
class Server:
    """Speed and memory of a server."""

    job: Job
    constants: Constants

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.job.hf)

    @cached_property
    def links(self) -> Links:
        return Links.of(self.job.gpu, self.job.link_domain, self.constants)

    @property
    def weight_width(self) -> int:
        return 1 if self.job.server_precision == "fp8" else 2

    @property
    def peak(self) -> float:
        return self.job.gpu.bf16_flops * (self.constants.fp8 if self.job.server_precision == "fp8" else 1)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights on each GPU."""
        return self.weight_width * whole(self.job.hf) // self.job.server_gpus

    @cached_property
    def token_bytes(self) -> float:
        """Bytes of a token in the KV cache of each GPU: heads are sharded, as far as there are enough."""
        shape = self.shape
        return 2 * shape.num_layers * shape.cache_size / min(self.job.server_gpus, shape.cache_parts)

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache on each GPU."""
        return max(0, int(self.job.memory_fraction * self.job.gpu.memory_bytes) - self.weight_bytes)

    @cached_property
    def room(self) -> float:
        """Number of completions of mean context that fit into the KV cache."""
        held = context_of_writing(self.job, self.constants)
        return self.cache_bytes * self.constants.cache_waste / (self.token_bytes * held)

    def step(self, running: float) -> float:
        """Seconds of a decode step with `running` completions."""
        c, job, shape = self.constants, self.job, self.shape
        bandwidth = job.gpu.memory_bandwidth * c.decode_memory
        flops = 2 * running * shape.active_params / job.server_gpus
        weights = max(self._read(running) / bandwidth, flops / (self.peak * c.decode_matmul))
        cache = running * context_of_writing(job, c) * self.token_bytes / bandwidth
        return weights + cache + self._sent(running) + c.decode_step_s + shape.num_layers * c.decode_layer_s

    def prefill(self, tokens: float) -> float:
        """Seconds of the prefill of `tokens` prompt tokens."""
        rate = self.job.server_gpus * self.peak * self.constants.prefill_matmul
        return 2 * tokens * self.shape.active_params / rate

    def _read(self, running: float) -> float:
        """Bytes of weights that a step reads: of experts only those chosen by a token."""
        shape = self.shape
        if not shape.num_sparse:
            return self.weight_bytes
        experts = shape.num_sparse * shape.expert_params * self.weight_width / self.job.server_gpus
        chosen = 1 - (1 - shape.num_chosen / shape.num_experts) ** running
        return self.weight_bytes - experts * (1 - chosen)

    def _sent(self, running: float) -> float:
        """Seconds of two all-reduces over the server's GPUs in each layer."""
        size = self.job.server_gpus
        if size == 1:
            return 0.0
        is_wide = size > self.job.link_domain
        least = self.constants.all_reduce_nic_s if is_wide else self.constants.all_reduce_s
        one = least + 2 * self.links.ring(2 * running * self.shape.hidden, size)
        return 2 * self.shape.num_layers * one


def rollout(job: Job, constants: Constants = CONSTANTS) -> Rollout:
    """Time to generate all completions of a step."""
    server = Server(job, constants)
    requests = max(1.0, job.sequences / job.num_servers)
    there = requests * job.ahead if job.runs_ahead else requests
    limits = {"cache": max(1.0, server.room), "requests": float(job.max_running), "work": there}
    bound = min(limits, key=lambda name: limits[name])
    full = limits[bound]
    tail = tail_of(job, constants)
    step_s, longest = server.step(full), tail * job.response_tokens
    prefill_s = server.prefill(job.prompts / job.num_servers * job.prompt_tokens)  # a group shares its prompt
    if job.runs_ahead:
        writing_s = max(requests * job.response_tokens / full, longest / (job.ahead + 1)) * step_s
        return Rollout(writing_s + prefill_s, prefill_s, 0.0, full, step_s, bound)
    waiting_s = (requests - full) * job.response_tokens / full * step_s
    middles = [(point + 0.5) / POINTS for point in range(POINTS)]
    tail_s = sum(server.step(max(1.0, full * running(at, tail))) for at in middles) * longest / POINTS
    return Rollout(waiting_s + tail_s + prefill_s, prefill_s, tail_s, full, step_s, bound)
