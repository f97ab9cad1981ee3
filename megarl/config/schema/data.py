"""Keys of training data: prompts, rewards, and the rows of supervised training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from megarl.config import names
from megarl.config.schema.record import (
    ALL,
    BASIC,
    EXPERT,
    RL,
    SFT,
    AtLeast2,
    Choices,
    Count,
    If,
    InsideUnit,
    Natural,
    Positive,
    Rewards,
    Sandbox,
    Seed,
    UpToHalf,
    Weights,
    key,
)

RETRIED = If("a reward is async")
IN_PROCESSES = If("it has processes of its own")
TIMED = If("it is an episode, or has processes of its own")
TRIED = If("it has processes of its own", "there are no agents")
ON_GPUS = If("servers use GPUs")


@dataclass
class Rows:
    train_files: list[str] = key([], "training rows: JSONL or parquet files, `datasets` folders", BASIC)
    val_files: list[str] = key([], "rows of the evaluation, as train_files; empty = no evaluation", BASIC)
    prompt_key: str = key("prompt", "field of a row: a string or chat messages (GSM8K's `question` is recognized)")


@dataclass
class Lengths:
    max_response_length: Count = key(512, "longest completion, in tokens", BASIC)


@dataclass
class Data(Lengths, Rows):
    ground_truth_key: str = key("ground_truth", "field of a row passed to the reward (GSM8K's `answer` is recognized)")
    train_batch_size: Count = key(256, "prompts per iteration; each gets rollout.n completions", BASIC)
    max_prompt_length: Count = key(1024, "longest prompt, in tokens", BASIC)
    shuffle: bool = key(True, "a new order of the prompts in every epoch")
    seed: Seed = key(II("trainer.seed"), "seed of the order of the prompts", If(".shuffle == true"), ALL)
    max_row_bytes: Count = key(
        2**24, "a longer row of any file of data is refused, in the supervised stage too", ALL, EXPERT
    )
    overlong_prompts: str = key(
        "error", "what to do with a prompt above max_prompt_length; left, right, middle cut it", Choices(names.OVERLONG)
    )
    system_prompt: str | None = key(None, "put before the messages of every prompt; null = none", ALL)
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "variables of the tokenizer's chat template, as {enable_thinking:false}; it ignores unknown ones", ALL
    )
    train_max_samples: Count | None = key(
        None, "train on this many rows, the first ones, before long prompts are filtered; null = all", RL
    )
    val_max_samples: Count | None = key(
        None, "evaluate on this many prompts, the first ones; null = all", If(".val_files != []")
    )


@dataclass
class Folder:
    path: str = key("", "Hugging Face folder or hub name of the weights; a critic's head starts at zero", BASIC)


@dataclass
class Keyed:
    api_key_env: str | None = key(
        None, "environment variable with the key of the server at the url; null = none", If("the server is yours")
    )


@dataclass
class Gpus:
    first_gpu: Natural | None = key(
        None, "first GPU of servers that the run starts; null = the first after the trainer's, or 0", ON_GPUS
    )
    memory_fraction: InsideUnit | None = key(
        None, "share of a GPU for weights and KV cache of a server; null = the engine's default", ON_GPUS
    )


@dataclass
class Served:
    urls: list[str] = key([], "urls of servers that run already, http://host:port; empty = the run starts them")


NUMBER = (
    r"(?i)(?<![a-z/])score(?: ?\([^()\n]*\))?(?: is)?[\s*_:=`>\"'$[]*+(?:\\boxed\{)?+"
    r"([-+]?(?:\d{1,3}(?:,\d{3})++(?:\.\d+)?|\d*\.?\d+)(?:e[-+]?\d+)?)(?!,?\d)"
)


@dataclass
class Typed:
    dtype: str = key("float32", "type of the weights, in training or on servers", Choices(names.DTYPES), BASIC)


@dataclass
class Judge(Keyed):
    url: str | None = key(None, "url of an OpenAI-compatible endpoint, with its version: http://host:port/v1")
    model: str | None = key(None, "name of the judge at this endpoint")
    prompt: str | None = key(None, "what the judge is asked, with {question}, {answer} and {truth}")
    read: str = key(NUMBER, "how to find the number in the answer: a regular expression, or json:FIELD")
    votes: Count = key(1, "how often the judge is asked for each answer; the mean counts")
    request: dict[str, Any] = key({}, "further fields of the request, as {temperature:0}")


@dataclass
class RewardModel(Gpus, Keyed, Folder):
    engine: str = key(
        "server", "a server, or ranks laid out by ref.* (with the policy's tokens)", Choices(names.REWARD_MODEL_ENGINES)
    )
    url: str | None = key(
        None, "url of a server of this model, http://host:port; null = the run starts one", If(".engine == server")
    )


@dataclass
class Requests:
    request_timeout_s: Positive = key(
        120.0, "time limit of a request; a longer completion continues in the next one", If("requests are made"), EXPERT
    )


@dataclass
class Processes:
    """Processes that run the user's code: rewards, or agents."""

    on_error: str = key(
        "unscored", "after an error or a timeout: unscored leaves its group, zero is 0", Choices(names.REWARD_ERRORS)
    )
    memory_mb: Count = key(
        8192, "memory of each process that runs this code, and of each of its children", IN_PROCESSES, EXPERT
    )
    file_mb: Count = key(1024, "size of a file that such a process writes", IN_PROCESSES, EXPERT)
    environment: list[str] = key([], "names of further variables that this code gets, such as keys")
    timeout_s: Positive = key(5.0, "time limit of one reward in these processes, or of an episode", TIMED)


@dataclass
class Reward(Processes, Requests):
    fn: Rewards = key(
        ["auto"], "auto (by data_source), a name, judge, model, or path/file.py:function; several are added", BASIC
    )
    weights: Weights = key(
        {}, "weight of each reward by its name (of a file's function); else 1", If("there are several rewards")
    )
    by_data_source: dict[str, str] = key({}, "data_source of a row -> its reward, instead of fn")
    audit: str | None = key(None, "held-out reward, scored beside the others on every answer and never trained")
    special_tokens: bool = key(False, "show the reward the special tokens of an answer, but for the one that ends it")
    num_workers: Count = key(1, "processes that compute rewards", IN_PROCESSES)
    try_rows: Natural = key(
        4, "rows of each set of prompts on which rewards are tried before a run; 0 = no trial", TRIED
    )
    concurrency: Count = key(64, "calls of one async reward at once", RETRIED)
    per_minute: Positive | None = key(
        None, "calls of one async reward begun in a minute, evenly; null = no limit", RETRIED
    )
    retries: Natural = key(
        4, "new tries of an async call after status 408, 429 or 5xx, a timeout, or a lost connection", RETRIED, EXPERT
    )
    judge: Judge = key(Judge, "model that is asked for a score", If("a reward is called judge"))
    model: RewardModel = key(RewardModel, "model that gives a score", If("a reward is called model"))
    sandbox: Sandbox = key(
        "auto", "where a model's code runs: auto, jail, bubblewrap, url:http://HOST:PORT", If("a reward runs code")
    )
    shuffle: bool = key(False, "give rewards to the wrong samples: a control experiment that must not learn")


@dataclass
class Sft(Rows):
    response_key: str = key("response", "field of a row: what is trained on; pairs have `chosen` and `rejected`", SFT)
    answers: str = key(
        "all", "which of the assistant's answers of a conversation are trained on", Choices(names.SFT_ANSWERS)
    )
    epochs: Count = key(1, "passes over the files", BASIC)
    batch_size: Count = key(64, "sequences, or pairs, per optimizer step", BASIC)
    max_length: AtLeast2 = key(1024, "longest prompt and response together, in tokens", BASIC)
    overlong_rows: str = key(
        "error", "what to do with a row longer than max_length: left, right, middle cut it", Choices(names.OVERLONG)
    )


@dataclass
class Dpo:
    loss: str = key("sigmoid", "loss of a pair: DPO's, or IPO's of means over tokens", Choices(names.PAIR_LOSSES))
    beta: Positive = key(0.1, "how near the policy stays to the model at the start; higher = nearer", BASIC)
    label_smoothing: UpToHalf = key(0.0, "share of pairs whose label may be wrong", If(".loss == sigmoid"))
    reference_free: bool = key(False, "compare answers by their log-probs alone, without the model at the start")
