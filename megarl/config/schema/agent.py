"""Keys of agents: episodes of several turns instead of plain completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Agent:
    fn: str | None = None  # an episode: path/file.py:function | package.module:function; null = plain completions
    command: list[str] = field(
        default_factory=list
    )  # instead of fn, a program and its arguments; {prompt} {uid} {base_url} {api_key} {model} are filled in
    args: dict[str, Any] = field(default_factory=dict)  # further keyword arguments of the function
    history: str = "generated"  # earlier answers as they were generated | as the chat template has them rendered
    tool_parser: str = "hermes"  # how the model writes calls of tools: hermes (Qwen, Hermes) | none
    max_turns: int = 16  # answers of an episode; a request for more ends it
    max_tokens: int | None = None  # of an episode, all its rows; null = data.max_prompt_length + max_response_length
    timeout_s: float = 600.0  # time limit of an episode
    num_processes: int = 16  # episodes at a time that run in a process of their own: plain functions, commands
    memory_mb: int = 8192  # of each such process
    file_mb: int = 1024  # size of a file that such a process writes
    on_error: str = "unscored"  # after an error or a timeout: unscored leaves its group | zero counts 0 | stop the run
    over_limit_reward: float | None = (
        None  # of an episode that a limit ended before its own reward; null = unscored, or reward.fn's if none has one
    )
    environment: list[str] = field(default_factory=list)  # names of further variables that agents get, such as keys
