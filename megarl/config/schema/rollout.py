"""Keys of what generates: servers, and agents, whose episodes of several turns replace plain completions."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any

from omegaconf import II

from megarl.config import names
from megarl.config.schema.data import IN_PROCESSES, TIMED, Data, Gpus, Lengths, Processes, Requests, Served, Typed
from megarl.config.schema.record import (
    BASIC,
    EXPERT,
    RL,
    RL_EVALUATE,
    AtLeast1,
    Choices,
    Count,
    If,
    Natural,
    NotNegative,
    Positive,
    Range,
    Seed,
    Share,
    Temperature,
    TopK,
    follows,
    key,
)
from megarl.config.schema.roles import Model

STARTS = If(".urls == []")
PREFETCHES = If("rollout.ahead != 0")
COMPARED = If("there are servers to compare")
PLACES = Choices(names.PLACEMENTS)
EVALUATES = If("data.val_files != []")
MIXES = If("rollout.ahead != 0 or rollout.turn_s != null")  # weights of several versions


@dataclass
@follows("data", Data)
class ValKwargs(Lengths):
    temperature: NotNegative = key(0.0, "sampling temperature of evaluations; 0 = greedy")
    top_p: Share = key(1.0, "nucleus sampling of the evaluation's completions", If(".temperature != 0"))
    n: Count = key(1, "completions per evaluation prompt; their scores are averaged")


@dataclass
class SGLang:
    python: str | None = key(None, "interpreter of its environment; null = .venv-sglang/bin/python")
    args: list[str] = key([], "further arguments of its command line, passed unchanged", EXPERT)


@dataclass
@follows("model", Model)
class Rollout(Gpus, Served, Requests, Typed):
    engine: str = key(
        "auto", "hf is transformers; auto = sglang where it and a GPU are", Choices((names.AUTO, *names.ENGINES)), BASIC
    )
    sglang: SGLang = key(SGLang, "SGLang's own options", If("rollout.engine != hf"))
    n: Count = key(1, "completions per prompt: the size of a group", RL, BASIC)
    temperature: Temperature = key(1.0, "sampling temperature; the trainer's log-probs are scaled by it too", RL, BASIC)
    top_p: Share = key(
        1.0, "sample from the smallest set with this total probability; 1 = all (sglang: with top_k)", RL
    )
    top_k: TopK = key(-1, "sample from the k most likely tokens; -1 = all; log-probs are then over these", RL)
    tensor_model_parallel_size: Count = key(1, "GPUs of one server", BASIC)
    expert_parallel_size: Count = key(1, "ranks of one server that share the experts of a layer")
    attention_dp: Count = key(
        1, "attention data parallelism: groups of one server's ranks that share its requests and KV cache"
    )
    num_servers: Count = key(1, "servers, each with a whole copy of the model", STARTS, BASIC)
    join: str | None = key(
        None, "HOST:PORT where the driver listens for servers that join and leave while the run goes on"
    )
    placement: str = key(
        "separate", "separate: own GPUs; shared (colocation): the trainer's GPUs, in turns", PLACES, BASIC
    )
    router: bool = key(False, "send requests through SGLang's router instead of to each server")
    ahead: Natural = key(0, "prefetch: iterations that the rollout may run ahead of training; 0 = on-policy", RL, BASIC)
    order: str = key(
        "finished", "the oldest of the finished groups, or prompts as they were begun", Choices(names.ORDERS), MIXES, RL
    )
    update: str = key(
        "in_place", "a push keeps the KV cache (in_place), or waits (drain)", Choices(names.UPDATES), PREFETCHES, RL
    )
    max_age: Natural | None = key(
        None, "tokens that weights older than this generated are left out of the loss; null = all count", MIXES, RL
    )
    piece_tokens: Natural = key(
        2048, "tokens of one request; a longer completion continues in the next; 0 = one request", EXPERT
    )
    turn_s: Positive | None = key(
        None, "seconds that shared servers generate in a turn; what is unfinished continues later", RL
    )
    num_collectors: Count | None = key(
        None, "processes that request and score completions; null = one for 8 servers", EXPERT
    )
    max_in_flight: Count | None = key(None, "requests at a time; null = max_running_requests of every server", EXPERT)
    max_running_requests: Count = key(512, "completions that a server generates at the same time")
    max_total_tokens: int | None = key(None, "size of a server's KV cache; null = enough for max_running_requests")
    quantization: str = key(
        "none", "fp8: sglang quantizes its linear layers when it loads the pushed weights", Choices(names.QUANTIZATIONS)
    )
    slow_factor: AtLeast1 | None = key(
        5.0, "restart a server whose replies take so many times as long as others'; null = never", COMPARED, RL, EXPERT
    )
    host: str = key("127.0.0.1", "address on which servers listen", If(".urls == []", "trainer.nnodes == 1"))
    tls: str = key("auto", "https of servers that a run starts; auto = not at loopback", Choices(names.TLS), STARTS)
    seed: Seed = key(II("trainer.seed"), "seed of the sampling")
    val_kwargs: ValKwargs = key(ValKwargs, "sampling of evaluations", EVALUATES, RL_EVALUATE)
    bucket_bytes: Count | None = key(
        None, "bytes of weights sent at once; null = by the model's size: 64 MiB to 2 GiB", RL, EXPERT
    )
    push: str = key(
        "auto", "transport of the weights; auto = the fastest that works", Choices(names.PUSHES), RL, EXPERT
    )
    check_every: Natural = key(
        100, "pushes between checks by whole tensors (quantized: by an exported folder); 0 = never", RL, EXPERT
    )
    max_restarts: Natural = key(
        3, "restarts of a server before it stays out; ten minutes of service reset the count", EXPERT
    )
    start_timeout_s: Positive = key(
        1800.0, "a server that takes longer to load counts as dead; so long a reward's service is waited for", EXPERT
    )


OverLimitReward = Annotated[
    float | str | None,
    Range(
        lambda v: v in ("unscored", "reward.fn") or (not isinstance(v, str) and isfinite(v)),
        "a finite number, unscored or reward.fn",
    ),
]
Ignored = Annotated[
    list[str],
    Range(lambda v: set(v) <= set(names.AGENT_IGNORED), f"some of {', '.join(names.AGENT_IGNORED)}"),
]


@dataclass
class Agent(Processes):
    fn: str | None = key(
        None, "an episode: path/file.py:function or package.module:function; null = plain completions", BASIC
    )
    command: list[str] = key(
        [], "program and its arguments instead of fn; {prompt} {uid} {base_url} {api_key} {model} are filled in"
    )
    args: dict[str, Any] = key({}, "further keyword arguments of the function", If("agent.command == []"))
    history: str = key(
        "generated", "earlier answers as generated, or rendered by the chat template", Choices(names.AGENT_HISTORIES)
    )
    tool_parser: str = key(
        "auto",
        "the model's form of tool calls; auto = as the chat template writes them, none = left in the text",
        Choices(names.TOOL_PARSERS),
    )
    max_turns: Count = key(16, "answers of an episode; a request for more ends it")
    max_tokens: Count | None = key(
        None, "tokens of all rows of an episode; null = data.max_prompt_length + max_response_length"
    )
    timeout_s: Positive = key(600.0, "time limit of one reward in these processes, or of an episode", TIMED)
    num_processes: Count = key(
        16, "episodes at a time that run in a process of their own: plain functions, commands", IN_PROCESSES
    )
    over_limit_reward: OverLimitReward = key(
        None,
        "reward of an episode that a limit ended before its own: a number, unscored, or reward.fn; null = unscored, or "
        "reward.fn if none has one",
    )
    ignore: Ignored = key(
        [], "fields of requests that the run's values replace, which is said once; others that differ are refused"
    )
