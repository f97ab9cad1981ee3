"""Keys of the servers that generate completions."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import II


@dataclass
class ValKwargs:
    temperature: float = 0.0  # of the evaluation's completions; 0 = greedy
    top_p: float = 1.0  # nucleus sampling of the evaluation's completions
    n: int = 1  # completions per evaluation prompt; their scores are averaged
    max_response_length: int = II("data.max_response_length")  # longest completion of the evaluation, in tokens


@dataclass
class SGLang:
    python: str | None = None  # interpreter of its environment; null = .venv-sglang/bin/python
    args: list[str] = field(default_factory=list)  # further arguments of its command line, passed unchanged


@dataclass
class Rollout:
    engine: str = "auto"  # program that generates: hf (transformers) | sglang; auto = sglang where it and a GPU are
    sglang: SGLang = field(default_factory=SGLang)
    n: int = 1  # completions per prompt: the size of a group
    temperature: float = 1.0  # of the softmax; the trainer's log-probs are scaled by it too
    top_p: float = 1.0  # sample from the smallest set with this total probability; 1 = all (sglang: with top_k)
    top_k: int = -1  # sample from the k most likely tokens; -1 = all; log-probs are then over these
    tensor_model_parallel_size: int = 1  # GPUs of one server
    expert_parallel_size: int = 1  # ranks of one server that share the experts of a layer
    attention_dp: int = (
        1  # attention data parallelism: groups of one server's ranks that share its requests and KV cache
    )
    num_servers: int = 1  # servers, each with a whole copy of the model
    urls: list[str] = field(default_factory=list)  # of servers that already run (launch/servers.sh); empty = start them
    join: str | None = None  # HOST:PORT where the driver listens for servers that join and leave while the run goes on
    placement: str = "separate"  # separate (own GPUs) | shared (colocation: the trainer's GPUs, in turns)
    first_gpu: int | None = None  # first GPU of the servers; null = the first after the trainer's; shared, evaluate: 0
    memory_fraction: float | None = None  # share of a GPU for weights and KV cache; null = the engine's default
    router: bool = False  # sglang: send requests through its router instead of to each server
    ahead: int = 0  # prefetch: iterations that the rollout may run ahead of training; 0 = on-policy
    order: str = "finished"  # finished (of the finished groups the oldest) | prompts (strictly as they were begun)
    update: str = "in_place"  # a push with ahead>0: in_place (keeps the KV cache) | retract | drain (waits)
    max_age: int | None = None  # tokens that older weights wrote are left out of the loss; null = all count
    piece_tokens: int = 2048  # tokens of one request; a longer completion continues in the next; 0 = one request
    turn_s: float | None = None  # shared: seconds that servers generate in a turn; what is unfinished continues later
    num_collectors: int | None = None  # processes that request and score completions; null = one for 8 servers
    max_in_flight: int | None = None  # requests at a time; null = max_running_requests of every server
    max_running_requests: int = 512  # completions that a server generates at the same time
    max_total_tokens: int | None = None  # size of a server's KV cache; null = enough for max_running_requests
    dtype: str = II("model.dtype")  # of the server's weights
    quantization: str = "none"  # none | fp8: sglang quantizes its linear layers when it loads the pushed weights
    request_timeout_s: float = 120.0  # a request that takes longer is ended, and the next one continues its tokens
    slow_factor: float | None = (
        5.0  # a server is started again if its replies take so many times as long as others' do; null = never
    )
    host: str = "127.0.0.1"  # address on which servers listen
    tls: str = "auto"  # https of servers that a run starts: always | never | auto (not at loopback)
    seed: int = II("trainer.seed")  # of the sampling
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    bucket_bytes: int | None = None  # of weights on their way; null = from the model's size: 64 MiB to 2 GiB
    push: str = "auto"  # gathered | shared | sharded: transport of the weights; auto = the fastest that works
    check_every: int = 100  # pushes between checks by whole tensors (quantized: by an exported folder); 0 = never
    max_restarts: int = 3  # restarts of a server before it stays out; ten minutes of service reset the count
    start_timeout_s: float = 1800.0  # a server that takes longer to load its model counts as dead
