"""Time in which servers generate the completions of a step.

A decode step generates a token of each running completion.  It reads the weights, or computes with them if that takes
longer, and reads the KV cache of all running completions.  If the server is full, completions wait; when none waits any
more, the number of running ones falls with the tail of their lengths (`lengths.py`).  With prefetch, and in turns of
a fixed time, the tail of an iteration is generated beside the next ones (`waited`).  Expert parallelism inside a
server has no effect on the predicted time.

Attention data parallelism divides a server's running completions, and so its KV cache, over groups of its GPUs.  Each
group has attention and the vocabulary's tables whole.  Groups are assumed to be equally full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import gamma, inf

from megarl.arch.layers import Mixer
from megarl.plan.adapters import of_server
from megarl.plan.job import Job
from megarl.plan.lengths import context_of_decoding, running, tail_of
from megarl.weights.count import Shape, forward_flops, shape_of, whole

POINTS = 12  # of the tail, at which the speed is computed
# Layers with a state have a pool of them beside the KV cache, in SGLang 0.5.23: this share of the memory for both
# (--mamba-full-memory-ratio 0.9), and so many states for a running completion (2 are for the prefix cache, with
# overlapping schedules, and 2 for what comes next: mem_cache/kv_cache_configurator.py:_calculate_mamba_ratio).
STATE_SHARE, STATES = 0.9 / 1.9, 5


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

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.job.actor.hf)

    @property
    def weight_width(self) -> int:
        """Bytes of a parameter of the layers; the tables of the vocabulary are never quantized."""
        return 1 if self.job.server_precision == "fp8" else self.job.actor.width

    @property
    def group_gpus(self) -> int:
        """GPUs that share the attention of a completion."""
        return self.job.server_gpus // self.job.attention_dp

    @property
    def peak(self) -> float:
        return self.job.gpu.bf16_flops * (self.job.constants.fp8 if self.job.server_precision == "fp8" else 1)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights on each GPU."""
        job, shape = self.job, self.shape
        attention, tables = shape.mixer_params, shape.table_params
        rest = whole(job.actor.hf) - attention - tables
        of_group = self.weight_width * attention + self.job.actor.width * tables
        return (self.weight_width * rest + job.attention_dp * of_group) // job.server_gpus

    @cached_property
    def adapter_bytes(self) -> int:
        """Bytes of the memory for adapters on each GPU."""
        return self.job.actor.width * self.job.lora_slots * of_server(self.job) if self.job.lora_slots else 0

    @cached_property
    def token_bytes(self) -> float:
        """Bytes of a token in the KV cache of each GPU of its group."""
        return self.job.cache_width * self._held(lambda mixer: mixer.cache_size)

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of the states of a completion on each GPU of its group."""
        return self._held(lambda mixer: mixer.state_bytes(self.job.actor.width))

    def _held(self, of: Callable[[Mixer], float]) -> float:
        """Of all layers on each GPU of a group: heads are sharded, as far as there are enough."""
        mixers = ((kind.layer.mixer, count) for kind, count in self.shape.kinds.items())
        return sum(count * of(mixer) / min(self.group_gpus, mixer.parts) for mixer, count in mixers)

    @cached_property
    def free_bytes(self) -> int:
        """Bytes on each GPU for KV cache and states."""
        held = self.weight_bytes + self.adapter_bytes
        return max(0, int(self.job.memory_fraction * self.job.gpu.memory_bytes) - held)

    @cached_property
    def pool_bytes(self) -> int:
        """Bytes of the states on each GPU."""
        return int(STATE_SHARE * self.free_bytes) if self.state_bytes else 0

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache on each GPU."""
        room, most = self.free_bytes - self.pool_bytes, self.job.max_total_tokens
        return room if most is None else min(room, int(most * self.token_bytes))

    @cached_property
    def room(self) -> float:
        """Number of completions of mean context that fit into the KV cache, and whose states fit into the pool."""
        held = context_of_decoding(self.job)
        cached = inf  # for a model without attention
        if self.token_bytes:
            cached = self.cache_bytes * self.job.constants.cache_waste / (self.token_bytes * held)
        states = self.pool_bytes / (STATES * self.state_bytes) if self.state_bytes else cached
        return self.job.attention_dp * min(cached, states)

    def step(self, running: float) -> float:
        """Seconds of a decode step with `running` completions."""
        c, job, shape = self.job.constants, self.job, self.shape
        bandwidth = job.gpu.memory_bandwidth * c.decode_memory
        flops = running * forward_flops(shape, 1, 0) / job.server_gpus
        weights = max(self._read(running) / bandwidth, flops / (self.peak * c.decode_matmul))
        context = context_of_decoding(job)
        each = job.cache_width * self._held(lambda mixer: mixer.read_size(context))
        each += 2 * self.state_bytes  # a state is read and written
        cache = running / job.attention_dp * each / bandwidth
        return weights + cache + self._sent(running) + c.decode_step_s + shape.num_layers * c.decode_layer_s

    def prefill(self, tokens: float) -> float:
        """Seconds of the prefill of `tokens` prompt tokens."""
        rate = self.job.server_gpus * self.peak * self.job.constants.prefill_matmul
        return forward_flops(self.shape, tokens, 0) / rate

    def _read(self, running: float) -> float:
        """Bytes of weights that a step reads: of experts only those chosen by a token."""
        unread = 0.0
        for kind, count in self.shape.kinds.items():
            if experts := kind.layer.experts:
                unread += count * kind.parameters().experts * (1 - experts.chosen / experts.count) ** running
        return self.weight_bytes - unread * self.weight_width / self.job.server_gpus

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
        return self._least(size) + 2 * self.job.links.ring(2 * tokens * self.shape.hidden, size) if size > 1 else 0.0

    def _least(self, size: int) -> float:
        """Seconds of a call without data."""
        return self.job.constants.all_reduce_nic_s if size > self.job.link_domain else self.job.constants.all_reduce_s


def rollout(job: Job) -> Rollout:
    """Time in which servers generate as many completions as a step takes."""
    server = Server(job)
    requests = max(1.0, job.sequences / job.num_servers)
    there = requests * job.ahead if job.overlaps else requests  # some of (ahead + 1) iterations are finished
    limits = {"cache": max(1.0, server.room), "requests": min(job.max_running, job.in_flight), "work": there}
    bound = min(limits, key=lambda name: limits[name])
    full = limits[bound]
    tail = tail_of(job)
    step_s = server.step(full)
    longest = tail * job.response_tokens
    places = min(limits["cache"], limits["requests"])
    prefill_s = server.prefill(job.prompts / job.num_servers * job.prompt_tokens)  # a group shares its prompt
    if job.overlaps:
        generation = Rollout(0.0, prefill_s, 0.0, full, step_s, bound, places)
        return replace(generation, seconds=step_ahead(job, generation, 0.0))
    waiting_s = (requests - full) * job.response_tokens / full * step_s
    middles = [(point + 0.5) / POINTS for point in range(POINTS)]
    tail_s = sum(server.step(max(1.0, full * running(at, tail))) for at in middles) * longest / POINTS
    generation = Rollout(waiting_s + tail_s + prefill_s, prefill_s, tail_s, full, step_s, bound, places)
    return generation if job.turn_s is None else _turn(job, generation, job.turn_s)


def _turn(job: Job, generation: Rollout, turn_s: float) -> Rollout:
    """The servers' turn, of `turn_s` or more: what is unfinished continues in the next one.

    While the trainer works nothing is generated, so a turn is a step ahead of a training that takes no time.  It ends
    early when nothing is left to generate, so it never takes longer than an iteration (`generation`) with its tail.
    """
    seconds = max(turn_s, step_ahead(job, generation, 0.0))
    return replace(generation, seconds=seconds, tail=0.0) if seconds < generation.seconds else generation


def step_ahead(job: Job, generation: Rollout, working_s: float) -> float:
    """Seconds of a step ahead of the training, without the push, during which servers generate nothing.

    `working_s`: of the trainer.  While servers prefill they generate nothing either.  If the push drains, one whole
    iteration is generated between two pushes, however far ahead, and the trainer works on one that is finished.
    """
    if job.drains:
        return max(working_s, generation.seconds)
    beside_s = max(0.0, working_s - generation.prefill)
    step_s = beside_s + waited(job, generation.step_s, beside_s)
    full_s = job.sequences / job.num_servers * job.response_tokens / generation.places * generation.step_s
    return max(working_s, max(step_s, full_s) + generation.prefill)


PROMPTS, FINISHED = "prompts", "finished"  # rollout.order
ROUNDS = 40  # of a bisection


def waited(job: Job, step_s: float, working_s: float) -> float:
    """Seconds that the trainer waits for an iteration on which it works `working_s`, at servers with free places.

    `step_s`: of a decode step of a server.

    At most (ahead + 1) B prompts are outstanding, B those of an iteration, and new ones are admitted when the trainer
    begins to wait.  Say the trainer waits w seconds for an iteration and works t seconds on it, and a share
    unfinished(x) of the prompts admitted x seconds ago still lacks a completion.  The iteration is complete as soon as
    the other ahead * B outstanding prompts are all that is unfinished:

        unfinished(w) + unfinished(w + s) + unfinished(w + 2 s) + ... = ahead,  where s = w + t

    order=finished: a prompt is finished with the last of its n completions, whose lengths are taken as independent.
    order=prompts: an iteration is finished as a whole, with the slowest of its B * n completions.
    This is a balance of means: an iteration of few prompts takes longer.  Full servers are a second limit: the tokens
    of an iteration over those that the servers generate a second.  The larger of both counts, so that where both are
    about equal the prediction is up to a fifth too short (tests/plan/test_plan_ahead.py compares a simulation).
    """
    tail = tail_of(job)
    longest_s = tail * job.response_tokens * step_s
    if job.order == PROMPTS:
        end_s = slowest(job.sequences, tail) * longest_s
        return balanced_wait(job.ahead, working_s, lambda _: 1.0, end_s)
    return balanced_wait(
        job.ahead, working_s, lambda age_s: 1 - (1 - running(age_s / longest_s, tail)) ** job.n, longest_s
    )


def balanced_wait(ahead: int, working_s: float, unfinished: Callable[[float], float], end_s: float) -> float:
    """w of the equation above; `unfinished` is 0 from `end_s` on."""

    def are_enough(wait_s: float) -> bool:
        age_s, left = wait_s, 0.0
        while age_s < end_s and left <= ahead:
            left += unfinished(age_s)
            age_s += wait_s + working_s
        return left <= ahead

    low, high = 0.0, end_s
    if working_s > 0 and are_enough(low):
        return low
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if are_enough(middle) else (middle, high)
    return high


def slowest(count: int, tail: float) -> float:
    """Mean of the longest of `count` completions, over the longest that there can be (see lengths.py)."""
    if tail == 1:
        return 1.0
    power = 1 / (tail - 1)
    return 1 - gamma(1 + power) * count**-power
