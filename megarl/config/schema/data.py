"""Keys of training data: prompts, rewards, and the rows of supervised training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import II


@dataclass
class Data:
    train_files: list[str] = field(default_factory=list)  # training prompts: JSONL or parquet files, `datasets` folders
    val_files: list[str] = field(default_factory=list)  # the same, for the evaluation; empty = no evaluation
    prompt_key: str = "prompt"  # field of a row: a string or chat messages (GSM8K's `question` is recognized)
    ground_truth_key: str = "ground_truth"  # field of a row passed to the reward (GSM8K's `answer` is recognized)
    train_batch_size: int = 256  # prompts per iteration; each gets rollout.n completions
    max_prompt_length: int = 1024  # longest prompt, in tokens
    max_response_length: int = 512  # longest completion, in tokens
    shuffle: bool = True  # a new order of the prompts in every epoch
    seed: int = II("trainer.seed")  # of that order
    overlong_prompts: str = "error"  # longer than max_prompt_length: error | filter | cut: left | right | middle
    system_prompt: str | None = None  # put before the messages of every prompt; null = none
    apply_chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict
    )  # variables of the tokenizer's chat template: {enable_thinking:false}; one that it does not know does nothing
    train_max_samples: int | None = (
        None  # train on this many rows, the first ones, before long prompts are filtered; null = all
    )
    val_max_samples: int | None = None  # evaluate on this many prompts, the first ones; null = all


@dataclass
class Judge:
    url: str | None = None  # of an OpenAI-compatible endpoint, with its version: http://host:port/v1
    model: str | None = None  # the name of the judge at this endpoint
    prompt: str | None = None  # what it is asked, with {question}, {answer} and {truth}
    read: str = (
        r"(?i)(?<![a-z/])score(?: ?\([^()\n]*\))?(?: is)?[\s*_:=`>\"'$[]*+(?:\\boxed\{)?+"  # finds the number: a regex
        r"([-+]?(?:\d{1,3}(?:,\d{3})++(?:\.\d+)?|\d*\.?\d+)(?:e[-+]?\d+)?)(?!,?\d)"  # | json:FIELD
    )
    votes: int = 1  # it is asked so often for each answer; the mean counts
    api_key_env: str | None = None  # the environment variable that holds the key; null = it needs none
    request: dict[str, Any] = field(default_factory=dict)  # further fields of the request: {temperature:0}


@dataclass
class RewardModel:
    path: str | None = None  # a Hugging Face folder or hub name: sequence classification with one label
    engine: str = "server"  # server | megatron (on the run's ranks, as ref.* lays out; needs the policy's tokens)
    url: str | None = None  # of a server of this model, http://host:port; null = the run starts one
    api_key_env: str | None = None  # the environment variable that holds the key of `url`; null = it needs none
    first_gpu: int | None = None  # of the server that the run starts; needed on a machine with GPUs
    memory_fraction: float | None = None  # of that GPU, for weights and cache; null = the engine decides


@dataclass
class Reward:
    fn: list[str] = field(  # auto (by data_source) | exact | gsm8k | gsm8k_strict | math | math_dapo | choice | code
        default_factory=lambda: ["auto"]  # | code_strict | judge | model | path/file.py:function; several are added up
    )
    weights: dict[str, float] = field(
        default_factory=dict
    )  # of several rewards, by name (of a file's function); else 1
    by_data_source: dict[str, str] = field(default_factory=dict)  # data_source of a row -> its reward, instead of fn
    audit: str | None = None  # a held-out reward, scored beside the others on every answer and never trained
    special_tokens: bool = False  # the answer that a reward reads has its special tokens, but for the one that ends it
    num_workers: int = 1  # processes that compute rewards
    try_rows: int = 4  # rows of each set of prompts on which rewards are tried before a run starts; 0 = no trial
    timeout_s: float = 5.0  # time limit of one reward in these processes
    on_error: str = "unscored"  # after an error or a timeout: unscored leaves its group | zero counts 0 | stop the run
    concurrency: int = 64  # calls of one async reward at once
    per_minute: float | None = None  # calls of one async reward begun in a minute, evenly; null = no limit
    retries: int = 4  # new tries of an async call after status 408, 429 or 5xx, a timeout, or a lost connection
    request_timeout_s: float = 120.0  # time limit of one async call
    start_timeout_s: float = II("rollout.start_timeout_s")  # so long a service that refuses connections is waited for
    judge: Judge = field(default_factory=Judge)
    model: RewardModel = field(default_factory=RewardModel)
    sandbox: str = "auto"  # auto | jail | bubblewrap | url:http://HOST:PORT: where code of the model runs
    memory_mb: int = 8192  # of each process that computes rewards, and of each of its children
    file_mb: int = 1024  # size of a file that such a process writes
    environment: list[str] = field(default_factory=list)  # names of further variables that rewards get, such as keys
    shuffle: bool = False  # give rewards to the wrong samples: a control experiment that must not learn


@dataclass
class Sft:
    train_files: list[str] = field(default_factory=list)  # prompts and responses to imitate: JSONL, parquet, `datasets`
    val_files: list[str] = field(default_factory=list)  # the same, held out: their loss is evaluated; empty = none
    prompt_key: str = "prompt"  # field of a row: not part of the loss
    response_key: str = "response"  # field of a row: trained on
    answers: str = "all"  # of a conversation, which of the assistant's answers are trained on: all | last
    epochs: int = 1  # passes over the files
    batch_size: int = 64  # sequences per optimizer step
    max_length: int = 1024  # longest prompt and response together, in tokens
    overlong_rows: str = "error"  # longer than max_length: error | filter | cut: left | right | middle
