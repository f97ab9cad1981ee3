"""The score of a model folder by transformers' own `generate`, in a process of its own.

It shares no code with the servers, so that it is a second opinion on what they served.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from megarl.arch.hf_config import read_config
from megarl.data.chat import load_tokenizer
from megarl.processes import watchdog
from megarl.processes.child import end_session, start_child
from megarl.processes.lifetime import die_with_parent, last_lines
from megarl.rewards.result import Outcome
from megarl.rewards.scorer import Rewards
from megarl.samples.sample import Completion, Prompt, VersionSpan

BATCH = 64  # prompts at most: so news come often enough for a limit on the time between them


class Task(NamedTuple):
    """What is scored: the mean reward of an HF folder's greedy answers.  It can be pickled."""

    folder: str
    prompts: Sequence[Prompt]
    make_rewards: Callable[[], Rewards]
    max_new_tokens: int


class TransformersScore:
    """Example: pending = TransformersScore(task, log, silence_s=600); ...; pending.wait() -> 0.918"""

    def __init__(self, task: Task, log: Path, *, silence_s: float) -> None:
        """Starts the process, and returns at once.  `silence_s`: the longest time without a new answer or reward."""
        self._log = log
        self._silence_s = silence_s
        self._total = 2 * len(task.prompts)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            self._process, self._pipe = start_child(_answer, (os.getpid(), task), log=out)

    def wait(self, progress: Callable[[int, int], object] = lambda done, total: None) -> float:
        """The mean of the rewards that could be given; `progress` gets (answers and rewards so far, all of them).

        Raises RuntimeError if the process failed, or said nothing for `silence_s`.
        """
        try:
            return self._score(progress)
        finally:
            end_session(self._process)

    def _score(self, progress: Callable[[int, int], object]) -> float:
        done, heard = 0, time.monotonic()
        with suppress(EOFError, OSError):
            while time.monotonic() - heard < self._silence_s:
                watchdog.heartbeat()
                progress(done, self._total)
                if self._pipe.poll(1.0):
                    news, heard = self._pipe.recv(), time.monotonic()
                    if isinstance(news, float):
                        return news
                    done += news
            raise RuntimeError(
                f"after {done} of {self._total} answers and rewards transformers' generate, or a reward, gave none for "
                f"{self._silence_s:g} s; their log: {self._log}"
            )
        code = self._process.wait()
        raise RuntimeError(
            f"the answers of transformers' generate ended with exit code {code}; their log: {self._log}"
            f"{last_lines(self._log)}"
        )


def _answer(pipe: Connection, argument: tuple[int, Task]) -> None:
    parent_pid, task = argument
    die_with_parent(parent_pid)
    pipe.send(score(task, pipe.send))


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Those of config.json, generation_config.json and the tokenizer, each of which ends an answer of the servers."""
    given = [source.eos_token_id for source in (model.config, model.generation_config, tokenizer)]
    return sorted({each for ids in given if ids is not None for each in (ids if isinstance(ids, list) else [ids])})


def _ended(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Without what fills the row of an answer that ended before others."""
    return next((ids[: at + 1] for at, token in enumerate(ids) if token in ends), ids)


def score(task: Task, news: Callable[[int], object]) -> float:
    """In this process.  Prompts of equal length share a batch, so nothing is padded.

    `news`: gets the number of new answers, or of new rewards.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig  # with all modelling code, which only this needs
    from transformers.utils import logging

    tokenizer = load_tokenizer(task.folder)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(task.folder, config=read_config(task.folder), dtype=torch.float32)
    # Nothing of generation_config.json but its end tokens: servers have no penalty, and end at all that are known.
    ends = end_tokens(model, tokenizer)
    model.generation_config = GenerationConfig(eos_token_id=ends or None, do_sample=False)
    by_length: dict[int, list[Prompt]] = {}
    for prompt in task.prompts:
        by_length.setdefault(len(prompt.token_ids), []).append(prompt)
    batches = [same[at : at + BATCH] for same in by_length.values() for at in range(0, len(same), BATCH)]
    answers: list[tuple[Prompt, Completion]] = []
    with torch.inference_mode():
        for same in batches:
            length = len(same[0].token_ids)
            ids = torch.tensor([prompt.token_ids for prompt in same])
            written = model.eval().generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=task.max_new_tokens, pad_token_id=0
            )
            ids_of = (_ended(each, ends) for each in written[:, length:].tolist())
            texts = [str(tokenizer.decode(each, skip_special_tokens=True)) for each in ids_of]
            answers += [
                (prompt, Completion([], [], "stop", (VersionSpan(0, 0, 0),), text))
                for prompt, text in zip(same, texts, strict=True)
            ]
            news(len(same))
    rewards = task.make_rewards()

    async def score_one(prompt: Prompt, answer: Completion) -> Outcome:
        (outcome,) = await rewards.score(prompt, [answer])
        news(1)
        return outcome

    async def score_all() -> list[Outcome]:
        return await asyncio.gather(*(score_one(*answer) for answer in answers))

    rewards.start()
    try:
        outcomes = asyncio.run(score_all())
    finally:
        rewards.stop()  # else its threads keep a process that fails
    scores = [outcome.reward for outcome in outcomes if not isinstance(outcome, str)]
    return sum(scores) / len(scores) if scores else 0.0
