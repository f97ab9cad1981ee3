"""Keys of training data: prompts, rewards, and the rows of supervised training."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import II


@dataclass
class Data:
    train_files: list[str] = field(default_factory=list)  # JSONL files or `datasets` folders: the training prompts
    val_files: list[str] = field(default_factory=list)  # the same, for the evaluation; empty = no evaluation
    prompt_key: str = "prompt"  # field of a row: a string or chat messages (GSM8K's `question` is recognized)
    ground_truth_key: str = "ground_truth"  # field of a row passed to the reward (GSM8K's `answer` is recognized)
    train_batch_size: int = 256  # prompts per iteration; each gets rollout.n completions
    max_prompt_length: int = 1024  # longest prompt, in tokens
    max_response_length: int = 512  # longest completion, in tokens
    shuffle: bool = True  # a new order of the prompts in every epoch
    seed: int = II("trainer.seed")  # of that order
    overlong_prompts: str = "error"  # error | filter: what happens to a prompt longer than max_prompt_length
    system_prompt: str | None = None  # put before the messages of every prompt; null = none
    val_max_samples: int | None = None  # evaluate on this many prompts, the first ones; null = all


@dataclass
class Reward:
    fn: str = "exact"  # exact | gsm8k | gsm8k_strict | math | choice | code | code_strict | path/file.py:function
    num_workers: int = 1  # processes that compute rewards
    timeout_s: float = 5.0  # time limit of one reward
    on_error: str = "zero"  # zero | stop: after an exception or a timeout, count 0 or stop the run
    sandbox: str = "auto"  # auto | jail | bubblewrap | url:http://HOST:PORT: where code of the model runs
    memory_mb: int = 8192  # of each process that computes rewards, and of each of its children
    file_mb: int = 1024  # size of a file that such a process writes
    environment: list[str] = field(default_factory=list)  # names of further variables that rewards get, such as keys
    shuffle: bool = False  # give rewards to the wrong samples: a control experiment that must not learn


@dataclass
class Sft:
    train_files: list[str] = field(default_factory=list)  # JSONL files with prompts and the responses to imitate
    prompt_key: str = "prompt"  # field of a row: not part of the loss
    response_key: str = "response"  # field of a row: trained on
    epochs: int = 1  # passes over the files
    batch_size: int = 64  # sequences per optimizer step
    max_length: int = 1024  # longest prompt and response together, in tokens
