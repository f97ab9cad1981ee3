"""The score of a model folder by transformers' own `generate`, in a process of its own.

It shares no code with the servers, so that it is a second opinion on what they served.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from megarl.data.chat import load_tokenizer
from megarl.data.hf_config import read_config
from megarl.processes.child import start_child
from megarl.processes.lifetime import die_with_parent, last_lines
from megarl.processes.presence import show_life
from megarl.rewards.result import Outcome
from megarl.rewards.scorer import Rewards
from megarl.sample import Completion, Prompt, VersionSpan


class Task(NamedTuple):
    """What is scored: the mean reward of an HF folder's greedy answers.  It can be pickled."""

    folder: str
    prompts: Sequence[Prompt]
    make_rewards: Callable[[], Rewards]
    max_new_tokens: int


class TransformersScore:
    """Example: pending = TransformersScore(task, log); ...; pending.wait() -> 0.918"""

    def __init__(self, task: Task, log: Path) -> None:
        """Starts the process, and returns at once."""
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            self._process, self._pipe = start_child(_answer, (os.getpid(), task), log=out)

    def wait(self) -> float:
        """The mean of the rewards that could be given.  Raises RuntimeError if the process failed."""
        while not self._pipe.poll(1.0):
            show_life()
        with suppress(EOFError, OSError):
            return float(self._pipe.recv())
        code = self._process.wait()
        raise RuntimeError(
            f"the answers of transformers' generate ended with exit code {code}; their log: {self._log}"
            f"{last_lines(self._log)}"
        )


def _answer(pipe: Connection, argument: tuple[int, Task]) -> None:
    parent_pid, task = argument
    die_with_parent(parent_pid)
    pipe.send(score(task))


def score(task: Task) -> float:
    """In this process.  Prompts of equal length share a batch, so nothing is padded."""
    import torch
    from transformers import AutoModelForCausalLM  # with all modelling code, which only this needs
    from transformers.utils import logging

    tokenizer = load_tokenizer(task.folder)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(task.folder, config=read_config(task.folder), dtype=torch.float32)
    by_length: dict[int, list[Prompt]] = {}
    for prompt in task.prompts:
        by_length.setdefault(len(prompt.token_ids), []).append(prompt)
    answers: list[tuple[Prompt, Completion]] = []
    with torch.inference_mode():
        for length, same in by_length.items():
            ids = torch.tensor([prompt.token_ids for prompt in same])
            written = model.eval().generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=task.max_new_tokens
            )
            texts = tokenizer.batch_decode(written[:, length:], skip_special_tokens=True)
            answers += [
                (prompt, Completion([], [], "stop", (VersionSpan(0, 0, 0),), text))
                for prompt, text in zip(same, texts, strict=True)
            ]
    rewards = task.make_rewards()

    async def score_all() -> list[list[Outcome]]:
        return await asyncio.gather(*(rewards.score(prompt, [answer]) for prompt, answer in answers))

    rewards.start()
    outcomes = [outcome for group in asyncio.run(score_all()) for outcome in group]
    scores = [outcome.reward for outcome in outcomes if not isinstance(outcome, str)]
    return sum(scores) / len(scores) if scores else 0.0
