"""Time in which servers generate the completions of a step.

A decode step generates a token of each running completion.  It reads the weights, or computes with them if that takes
longer, and reads the KV cache of all running completions.  If the server is full, completions wait; when none waits any
more, the number of running ones falls with the tail of their lengths (`lengths.py`).  With prefetch, and in turns of
a fixed time, the tail of an iteration is generated beside the next ones (`ahead.py`).  Expert parallelism inside a
server has no effect on the predicted time.

Attention data parallelism divides a server's running completions, and so its KV cache, over groups of its GPUs.  Each
group has attention and the vocabulary's tables whole.  Groups are assumed to be equally full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from megarl.plan.job import Job
from megarl.plan.memory.adapters import of_server
from megarl.plan.memory.count import whole
from megarl.plan.time.ahead import waited
from megarl.plan.time.constants import CONSTANTS, Constants
from megarl.plan.time.flops import Shape, shape_of
from megarl.plan.time.lengths import context_of_writing, running, tail_of
from megarl.plan.time.links import Links

POINTS = 12  # of the tail, at which the speed is computed


@dataclass(frozen=True)
class Rollout:
    """One step of the run."""

    seconds: float  # ahead of the training: of a step whose training takes no time; in turns: of the servers' turn
    prefill: float  # part of seconds: prefill of prompts
    tail: float  # part of seconds: after the last waiting completion has started
    concurrency: float  # concurrent completions of a full server
    step_s: float  # decode step of a full server
    bound: str  # cache | requests | work: the limit of the concurrency
    places: float  # completions that a server may run at the same time


NOTHING = Rollout(0.0, 0.0, 0.0, 0.0, 0.0, "work", 1.0)  # for the time of a step without generation


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
        """Bytes of a parameter of the layers; the tables of the vocabulary are never quantized."""
        return 1 if self.job.server_precision == "fp8" else self._plain_width

    @property
    def _plain_width(self) -> int:
        return 4 if self.job.dtype == "float32" else 2

    @property
    def group_gpus(self) -> int:
        """GPUs that share the attention of a completion."""
        return self.job.server_gpus // self.job.attention_dp

    @property
    def peak(self) -> float:
        return self.job.gpu.bf16_flops * (self.constants.fp8 if self.job.server_precision == "fp8" else 1)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights on each GPU."""
        job, shape = self.job, self.shape
        attention, tables = shape.num_layers * shape.attention_params, shape.table_params
        rest = whole(job.hf) - attention - tables
        of_group = self.weight_width * attention + self._plain_width * tables
        return (self.weight_width * rest + job.attention_dp * of_group) // job.server_gpus

    @cached_property
    def adapter_bytes(self) -> int:
        """Bytes of the memory for adapters on each GPU."""
        return self._plain_width * self.job.lora_slots * of_server(self.job) if self.job.lora_slots else 0

    @cached_property
    def token_bytes(self) -> float:
        """Bytes of a token in the KV cache of each GPU of its group: heads are sharded, as far as there are enough."""
        shape = self.shape
        return self.job.cache_width * shape.num_layers * shape.cache_size / min(self.group_gpus, shape.cache_parts)

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache on each GPU."""
        held = self.weight_bytes + self.adapter_bytes
        room = max(0, int(self.job.memory_fraction * self.job.gpu.memory_bytes) - held)
        most = self.job.max_total_tokens
        return room if most is None else min(room, int(most * self.token_bytes))

    @cached_property
    def room(self) -> float:
        """Number of completions of mean context that fit into the KV cache."""
        held = context_of_writing(self.job, self.constants)
        return self.job.attention_dp * self.cache_bytes * self.constants.cache_waste / (self.token_bytes * held)

    def step(self, running: float) -> float:
        """Seconds of a decode step with `running` completions."""
        c, job, shape = self.constants, self.job, self.shape
        bandwidth = job.gpu.memory_bandwidth * c.decode_memory
        flops = 2 * running * shape.active_params / job.server_gpus
        weights = max(self._read(running) / bandwidth, flops / (self.peak * c.decode_matmul))
        cache = running / job.attention_dp * context_of_writing(job, c) * self.token_bytes / bandwidth
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
        """Seconds of two all-reduces over the server's GPUs in each layer.

        With attention data parallelism the first is over the GPUs of a group.  In place of the second the tokens of all
        groups are gathered before the feed-forward layer and reduced and scattered after it: the same bytes, in two
        calls.
        """
        job = self.job
        if job.attention_dp == 1:
            return 2 * self.shape.num_layers * self._reduced(running, job.server_gpus)
        calls = self._reduced(running / job.attention_dp, self.group_gpus)
        calls += self._least(job.server_gpus) + self._reduced(running, job.server_gpus)
        return self.shape.num_layers * calls

    def _reduced(self, tokens: float, size: int) -> float:
        """Seconds of an all-reduce of the hidden states of `tokens` over `size` GPUs."""
        return self._least(size) + 2 * self.links.ring(2 * tokens * self.shape.hidden, size) if size > 1 else 0.0

    def _least(self, size: int) -> float:
        """Seconds of a call without data."""
        return self.constants.all_reduce_nic_s if size > self.job.link_domain else self.constants.all_reduce_s


def rollout(job: Job, constants: Constants = CONSTANTS) -> Rollout:
    """Time in which servers generate as many completions as a step takes."""
    server = Server(job, constants)
    requests = max(1.0, job.sequences / job.num_servers)
    there = requests * job.ahead if job.overlaps else requests  # some of (ahead + 1) iterations are finished
    limits = {"cache": max(1.0, server.room), "requests": min(job.max_running, job.in_flight), "work": there}
    bound = min(limits, key=lambda name: limits[name])
    full = limits[bound]
    tail = tail_of(job, constants)
    step_s, longest, places = server.step(full), tail * job.response_tokens, min(limits["cache"], limits["requests"])
    prefill_s = server.prefill(job.prompts / job.num_servers * job.prompt_tokens)  # a group shares its prompt
    if job.overlaps:
        written = Rollout(0.0, prefill_s, 0.0, full, step_s, bound, places)
        return replace(written, seconds=step_ahead(job, written, 0.0, constants))
    waiting_s = (requests - full) * job.response_tokens / full * step_s
    middles = [(point + 0.5) / POINTS for point in range(POINTS)]
    tail_s = sum(server.step(max(1.0, full * running(at, tail))) for at in middles) * longest / POINTS
    written = Rollout(waiting_s + tail_s + prefill_s, prefill_s, tail_s, full, step_s, bound, places)
    return written if job.turn_s is None else _turn(job, written, job.turn_s, constants)


def _turn(job: Job, written: Rollout, turn_s: float, constants: Constants) -> Rollout:
    """The servers' turn, of `turn_s` or more: what is unfinished continues in the next one.

    While the trainer works nothing is generated, so a turn is a step ahead of a training that takes no time.  It ends
    early when nothing is left to generate, so it never takes longer than an iteration (`written`) with its tail.
    """
    seconds = max(turn_s, step_ahead(job, written, 0.0, constants))
    return replace(written, seconds=seconds, tail=0.0) if seconds < written.seconds else written


def step_ahead(job: Job, written: Rollout, working_s: float, constants: Constants) -> float:
    """Seconds of a step ahead of the training, without the push, during which servers write nothing.

    `working_s`: of the trainer.  While servers prefill they write nothing either.  If the push drains, one whole
    iteration is generated between two pushes, however far ahead, and the trainer works on one that is finished.
    """
    if job.drains:
        return max(working_s, written.seconds)
    beside_s = max(0.0, working_s - written.prefill)
    step_s = beside_s + waited(job, written.step_s, beside_s, constants)
    full_s = job.sequences / job.num_servers * job.response_tokens / written.places * written.step_s
    return max(working_s, max(step_s, full_s) + written.prefill)
