"""The numbers of a run that a prediction needs, without a `Config`: models, layouts, servers, lengths."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.arch.gpus import Gpu
from megarl.arch.layers import HFConfig
from megarl.arch.layout import Layout
from megarl.arch.projections import ALL
from megarl.plan.constants import CONSTANTS, Constants, Links


@dataclass(frozen=True)
class Role:
    """A model on training ranks.  optimizer None: it is not trained."""

    name: str  # actor | critic | ref | teachers.NAME
    hf: HFConfig
    layout: Layout
    num_ranks: int
    first_rank: int = 0  # of the trainer's
    max_tokens: int = 16384  # of a training micro-batch, over all context-parallel ranks
    log_prob_tokens: int = 16384  # of a micro-batch of a forward-only pass
    max_sequences: int | None = None  # of any micro-batch, if the limit is one of sequences
    recompute: str = "none"  # none | selective (recompute_modules, or the core attention) | full (layers)
    recompute_modules: tuple[str, ...] = ()  # by Megatron's names
    optimizer: str | None = "adamw"
    dtype: str = "bfloat16"
    fsdp: bool = False
    overlap_grad_reduce: bool = False
    param_offload: bool = False  # weights and gradients are offloaded to host memory
    optimizer_offload: bool = False
    optimizer_on_host: bool = False  # moments are there always, and adam runs there
    lora_rank: int = 0  # above 0 only adapters are trained
    local: bool = False  # layers without Transformer-Engine
    lora_targets: tuple[str, ...] = (ALL,)
    mtp: int = 0  # MTP layers that are trained beside it
    shares_prefixes: bool = False  # the prompt of several completions is computed once

    @property
    def width(self) -> int:
        """Bytes of a number of the model."""
        return 4 if self.dtype == "float32" else 2

    @property
    def copies(self) -> int:
        """Data-parallel replicas."""
        return self.num_ranks // self.layout.model_size


@dataclass(frozen=True)
class Job:
    """A run on a cluster.  Example: Job(find("h100"), Role("actor", hf, Layout(tp=4), 64), num_servers=16, ...)."""

    gpu: Gpu
    actor: Role
    gpus_per_node: int = 8

    # the step
    prompts: int = 256
    n: int = 1  # completions per prompt
    prompt_tokens: float = 512.0  # mean
    response_tokens: float = 1024.0  # mean
    longest: int = 2048  # limit of a prompt with its completion
    longest_served: int = 0  # the same in evaluations, where it is larger
    most_response: int | None = None  # limit of a completion; None: `longest` minus a mean prompt
    mini_batch: int = 256  # prompts per optimizer step
    epochs: int = 1

    # the actor's training
    precision: str = "bf16"  # bf16 | fp8: of matrix products in training
    old_share: float = 1.0  # of the step's completions in a forward pass for the old log-probs alone
    router_replay: str = "off"  # off | old | rollout
    pins_routes: bool = True  # SGLang keeps the experts of tokens in host memory; our own server within its KV cache
    most_drawn: int = 0  # ids that could be drawn for a token, at most, which travel with it; 0: all, and none travel
    dispatch: str = "each"  # each (alltoall: a token is sent to each chosen expert) | once (DeepEP: once per machine)

    # other models on the same or further ranks
    critic: Role | None = None
    reference: Role | None = None
    teachers: tuple[Role, ...] = ()  # assumed to teach equal shares of the samples
    reads_heads: bool = False  # the actor computes the teachers' logits of the whole vocabulary
    teacher_top_k: int = 0  # likeliest tokens that teachers report for each token; 0: none

    # servers
    shared: bool = True  # colocation on the trainer's GPUs; else on separate GPUs
    server_gpus: int = 1  # per server
    num_servers: int = 1
    server_ep: int = 1
    attention_dp: int = 1  # groups of a server's GPUs that share its requests and KV cache
    server_precision: str = "bf16"  # bf16 | fp8: of its weights and matrix products
    memory_fraction: float = 0.7  # of a GPU, for weights and KV cache
    max_running: int = 256  # completions that a server generates at the same time
    max_in_flight: int | None = None  # requests at a time, to all servers; None: as many as they run
    max_total_tokens: int | None = None  # limit of a server's KV cache; None: all that fit
    cache_width: int = 2  # bytes of a number in the KV cache
    lora_slots: int = 0  # adapters that a server has memory for; 0: it gets merged weights
    not_modelled: tuple[str, ...] = ()  # settings that change nothing here
    ahead: int = 0  # iterations of prefetch
    order: str = "finished"  # finished | prompts: what the trainer takes of it
    drains: bool = False  # a push waits for all that is generated
    turn_s: float | None = None  # shared: seconds of the servers' turn, with ahead=1; None: until an iteration is there

    # the push
    push: str = "sharded"  # sharded (slices, from shard to shard) | gathered (whole tensors)
    bucket_bytes: int = 2**26

    async_save: bool = False  # checkpoints are copied to host memory, and written while the training goes on
    constants: Constants = CONSTANTS  # of the time model

    @property
    def roles(self) -> tuple[Role, ...]:
        learners = (role for role in (self.actor, self.critic, self.reference) if role is not None)
        return (*learners, *self.teachers)

    @property
    def num_gpus(self) -> int:
        """All GPUs of the run; roles share the trainer's."""
        trainer = max(role.first_rank + role.num_ranks for role in self.roles)
        servers = self.num_servers * self.server_gpus
        return max(trainer, servers) if self.shared else trainer + servers

    @property
    def runs_ahead(self) -> bool:
        """Whether servers generate while the trainer trains."""
        return not self.shared and self.ahead > 0

    @property
    def overlaps(self) -> bool:
        """Whether servers generate several iterations at a time, beside training and pushes."""
        return self.runs_ahead and not self.drains

    @property
    def in_flight(self) -> float:
        """Requests that a server is sent at a time; fewer than 1 if some servers get none."""
        return self.max_running if self.max_in_flight is None else self.max_in_flight / self.num_servers

    @property
    def sequences(self) -> int:
        return self.prompts * self.n

    @property
    def mean_tokens(self) -> float:
        """Mean length of a sequence."""
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> float:
        """Tokens of a step, with the prompt counted for every completion."""
        return self.sequences * self.mean_tokens

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per step of the run."""
        return max(1, round(self.prompts / self.mini_batch)) * self.epochs

    @property
    def link_domain(self) -> int:
        """Number of GPUs connected by fast links."""
        return self.gpu.link_domain or self.gpus_per_node

    @property
    def links(self) -> Links:
        constants = self.constants
        link, nic = self.gpu.link_bandwidth * constants.link, self.gpu.nic_bandwidth * constants.nic
        return Links(link, nic, self.link_domain)
