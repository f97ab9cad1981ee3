"""The servers that write completions."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import II


@dataclass
class ValKwargs:
    temperature: float = 0.0  # of the evaluation's completions; 0 = greedy
    top_p: float = 1.0  # their nucleus
    n: int = 1  # completions per evaluation prompt; their scores are averaged


@dataclass
class SGLang:
    python: str | None = None  # interpreter of its environment; null = .venv-sglang/bin/python
    args: list[str] = field(default_factory=list)  # further words of its command line, as they are


@dataclass
class Rollout:
    engine: str = "hf"  # the program that generates: hf (transformers' modelling code) | sglang
    sglang: SGLang = field(default_factory=SGLang)
    n: int = 1  # completions per prompt: the size of a group
    temperature: float = 1.0  # of the softmax; the trainer's log-probs are scaled by it too
    top_p: float = 1.0  # sample from the smallest set of tokens with this probability; 1 = all
    top_k: int = -1  # sample from the k likeliest tokens; -1 = all
    tensor_model_parallel_size: int = 1  # GPUs of one server
    expert_parallel_size: int = 1  # of these, ranks to which the experts are dealt
    num_servers: int = 1  # servers, each with a whole copy of the model
    urls: list[str] = field(default_factory=list)  # of servers that run already (launch/servers.sh); empty = start them
    placement: str = "separate"  # separate (GPUs of their own) | shared (those of the trainer, in turns)
    first_gpu: int | None = None  # first GPU of the servers; null = that behind the trainer's; shared, evaluate: 0
    memory_fraction: float | None = None  # sglang: share of a GPU for weights and KV cache; null = its own choice
    router: bool = False  # sglang: completions are asked for through its router rather than of each server
    ahead: int = 0  # iterations the rollout may run ahead of the training; 0 = on-policy
    max_running_requests: int = 512  # completions a server writes at a time
    max_total_tokens: int | None = None  # tokens of a server's KV cache; null = what the requests above may need
    dtype: str = II("model.dtype")  # of the server's weights
    request_timeout_s: float = 120.0  # a completion that takes longer is asked for again, elsewhere
    host: str = "127.0.0.1"  # where servers listen
    seed: int = II("trainer.seed")  # of the completions
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    bucket_bytes: int = 67108864  # weights are sent to the servers in pieces of this size
    push: str = "auto"  # gathered | shared | sharded: the way of the weights; auto = the fastest that works here
    check_every: int = 100  # pushes between comparisons with what servers read from an exported folder; 0 = none
    max_restarts: int = 3  # restarts of one server, then it stays out; ten minutes of service reset the count
    start_timeout_s: float = 1800.0  # a server that loads its model for longer counts as dead
