"""What is learnt on: prompts, rewards, and the rows of supervised learning."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import II


@dataclass
class Data:
    train_files: list[str] = field(default_factory=list)  # JSONL files or `datasets` folders: the prompts to learn on
    val_files: list[str] = field(default_factory=list)  # the same, for the evaluation; empty = no evaluation
    prompt_key: str = "prompt"  # field of a row: a string or chat messages (GSM8K's `question` is found by itself)
    ground_truth_key: str = "ground_truth"  # field of a row handed to the reward (GSM8K's `answer` likewise)
    train_batch_size: int = 256  # prompts per iteration; each gets rollout.n completions
    max_prompt_length: int = 1024  # longest prompt, in tokens
    max_response_length: int = 512  # longest completion, in tokens
    shuffle: bool = True  # a new order of the prompts in every epoch
    seed: int = II("trainer.seed")  # of that order
    overlong_prompts: str = "error"  # error | filter: a prompt longer than max_prompt_length
    system_prompt: str | None = None  # put before the messages of every prompt; null = none
    val_max_samples: int | None = None  # evaluate on the first so many prompts; null = all


@dataclass
class Reward:
    fn: str = "exact"  # exact | gsm8k | gsm8k_strict | math | choice | path/file.py:function
    num_workers: int = 1  # processes that compute rewards
    timeout_s: float = 5.0  # one reward may take this long
    on_error: str = "zero"  # zero | stop: what an exception or a time-out of the reward means
    shuffle: bool = False  # give rewards to the wrong samples: a control experiment that must not learn


@dataclass
class Sft:
    train_files: list[str] = field(default_factory=list)  # JSONL files with prompts and the responses to imitate
    prompt_key: str = "prompt"  # field of a row: not learnt
    response_key: str = "response"  # field of a row: learnt
    epochs: int = 1  # passes over the files
    batch_size: int = 64  # sequences per optimizer step
    max_length: int = 1024  # longest prompt and response together, in tokens
