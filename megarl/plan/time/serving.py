"""Seconds in which servers write the completions of a step.

A step of a server writes one token of each running completion.  It reads the weights, or computes with them where that
takes longer, and reads the cache of all that run.  Completions wait where the server is full; when nobody waits any
more the number of those that run falls with the tail of their lengths (`lengths.py`).  Where completions run ahead of
the training there is always somebody waiting, and no tail.  How a server deals its experts to its GPUs is not timed.
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

POINTS = 12  # of the tail, where the speed is looked at


@dataclass(frozen=True)
class Rollout:
    """One step of the run."""

    seconds: float
    prefill: float  # of these, for prompts
    tail: float  # of these, when nobody waits for a place any more
    concurrency: float  # completions of a server at a time, while it is full
    step_s: float  # of a server that is full
    bound: str  # cache | requests | work: what limits how many run at a time


NOTHING = Rollout(0.0, 0.0, 0.0, 0.0, 0.0, "work")  # where only the rest of a step is asked


@dataclass(frozen=True)
class Server:
    """One server's speed and room."""

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
        """On each GPU."""
        return self.weight_width * whole(self.job.hf) // self.job.server_gpus

    @cached_property
    def token_bytes(self) -> float:
        """Of a token in the cache of each GPU: heads are shared, as far as there are any."""
        shape = self.shape
        return 2 * shape.num_layers * shape.cache_size / min(self.job.server_gpus, shape.cache_parts)

    @cached_property
    def cache_bytes(self) -> int:
        """On each GPU, for the cache."""
        return max(0, int(self.job.memory_fraction * self.job.gpu.memory_bytes) - self.weight_bytes)

    @cached_property
    def room(self) -> float:
        """Completions of mean context that the cache holds."""
        held = context_of_writing(self.job, self.constants)
        return self.cache_bytes * self.constants.cache_waste / (self.token_bytes * held)

    def step(self, running: float) -> float:
        """Seconds in which each of so many completions gets a token."""
        c, job, shape = self.constants, self.job, self.shape
        bandwidth = job.gpu.memory_bandwidth * c.decode_memory
        flops = 2 * running * shape.active_params / job.server_gpus
        weights = max(self._read(running) / bandwidth, flops / (self.peak * c.decode_matmul))
        cache = running * context_of_writing(job, c) * self.token_bytes / bandwidth
        return weights + cache + self._sent(running) + c.decode_step_s + shape.num_layers * c.decode_layer_s

    def prefill(self, tokens: float) -> float:
        """Seconds of so many tokens of prompts."""
        rate = self.job.server_gpus * self.peak * self.constants.prefill_matmul
        return 2 * tokens * self.shape.active_params / rate

    def _read(self, running: float) -> float:
        """Bytes of weights that a step reads: of experts those that a token chose."""
        shape = self.shape
        if not shape.num_sparse:
            return self.weight_bytes
        experts = shape.num_sparse * shape.expert_params * self.weight_width / self.job.server_gpus
        chosen = 1 - (1 - shape.num_chosen / shape.num_experts) ** running
        return self.weight_bytes - experts * (1 - chosen)

    def _sent(self, running: float) -> float:
        """Two sums over the server's GPUs in each layer."""
        size = self.job.server_gpus
        if size == 1:
            return 0.0
        is_wide = size > self.job.link_domain
        least = self.constants.all_reduce_nic_s if is_wide else self.constants.all_reduce_s
        one = least + 2 * self.links.ring(2 * running * self.shape.hidden, size)
        return 2 * self.shape.num_layers * one


def rollout(job: Job, constants: Constants = CONSTANTS) -> Rollout:
    """Writing all completions of a step."""
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
