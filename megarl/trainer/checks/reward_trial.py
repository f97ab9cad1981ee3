"""Scores a few rows of the data before a run starts: a reward that cannot work stops it in seconds.

The rewards run in a process like that of a collector, with the same few variables of the environment.  Judges and
reward models are not asked: their servers may not be there yet.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

from megarl.config import Config
from megarl.config.validate.rewards import names_of
from megarl.data.prompts import Row
from megarl.metrics.trackers.console import warn
from megarl.processes.child import end_session, start_child
from megarl.processes.lifetime import die_with_parent
from megarl.processes.presence import show_life
from megarl.processes.warm import Program
from megarl.rewards import SERVICES
from megarl.rewards.result import Outcome
from megarl.rewards.scorer import Rewards
from megarl.sample import Completion, Prompt, VersionSpan
from megarl.trainer.build import plugins
from megarl.trainer.collectors import surroundings

PATIENCE_S = 60.0  # more than a reward's own limit: its first call may load what it needs
ANSWER = "0"  # to a row without ground truth
# A model writes such answers, too: nothing; the beginning of what the reward looks for, in no language's words; and the
# same again and again until the limit, where a reward of quadratic time shows.
ODD_ANSWERS = ("", "¿? … ничего 没有 <answer>\\boxed{ ```", "1 (" * 2**14)
_SHOWN = 60  # characters of an answer


class Job(NamedTuple):
    """One call of a reward."""

    fn: str
    prompt: Prompt
    completion: Completion


class RewardTrial:
    """The process starts at once and imports while the data is read; `check` then waits for it.

    Example:

        with RewardTrial(config) as trial:
            trial.check(prompts.some(config.reward.try_rows))
    """

    def __init__(self, config: Config) -> None:
        reward = config.reward
        self._config = config
        self._process: Program | None = None
        functions = [fn for fn in names_of(config) if fn not in SERVICES]
        if not reward.try_rows or not functions or config.has_agents:
            return
        make = partial(Rewards, num_workers=0, plugins=plugins(config), surroundings=surroundings(config))
        with open(os.devnull, "wb") as nowhere:
            self._process, self._pipe = start_child(run_trial, (os.getpid(), make), log=nowhere)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            end_session(self._process)
            self._pipe.close()

    @property
    def is_tried(self) -> bool:
        """Whether there are rewards to try."""
        return self._process is not None

    def check(self, rows: Sequence[Row]) -> None:
        """Call the rewards of each row with its ground truth as the answer, and once each with ODD_ANSWERS.

        What they say of these does not matter, nor whether they raise with reward.on_error=zero, which expects it.
        Raises ValueError, naming row and reward, for the first one that fails.  One that takes too long is named in a
        warning, and the rest is not tried: it may wait for a service that starts later.
        """
        odd = () if self._config.reward.on_error == "zero" else ODD_ANSWERS
        tried: set[str] = set()  # rewards, with odd answers
        for where, prompt in rows if self._process is not None else ():
            right = ANSWER if prompt.ground_truth is None else prompt.ground_truth
            fns = self._rewards_of(prompt)
            jobs = [(fn, answer) for fn in fns for answer in (right, *(() if fn in tried else odd))]
            tried.update(fns)
            for fn, answer in jobs:
                outcome = self._ask(Job(fn, prompt, stand_in(prompt, answer)))
                if outcome is None:
                    said = f"when it was tried on {where} with the answer {_short(answer)}"
                    return warn(f"reward {fn} did not answer within {self._limit_s:g} s {said}")
                if isinstance(outcome, str):
                    raise ValueError(
                        f"reward.fn={fn}: tried on {where} with the answer {_short(answer)} it failed: {outcome}; "
                        "reward.try_rows=0 starts a run without this trial"
                    )

    @property
    def _limit_s(self) -> float:
        return PATIENCE_S + max(self._config.reward.timeout_s, self._config.reward.request_timeout_s)

    def _rewards_of(self, prompt: Prompt) -> list[str]:
        by_source, fns = self._config.reward.by_data_source, self._config.reward.fn
        mine = [by_source[prompt.data_source]] if prompt.data_source in by_source else fns
        audits = [] if self._config.reward.audit is None else [self._config.reward.audit]
        return [fn for fn in (*mine, *audits) if fn not in SERVICES]

    def _ask(self, job: Job) -> Outcome | None:
        """None after `_limit_s`."""
        assert self._process is not None, "there is something to try"
        deadline = time.monotonic() + self._limit_s
        with suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send(job)
        while not self._pipe.poll(1.0):
            show_life()
            if time.monotonic() > deadline:
                return None
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            return f"its process died with exit code {self._process.wait()}"


def _short(answer: str) -> str:
    return repr(answer) if len(answer) <= _SHOWN else f"{answer[:_SHOWN]!r}... of {len(answer)} characters"


def stand_in(prompt: Prompt, text: str) -> Completion:
    """An answer that no model wrote; its tokens are those of the prompt, so that there are some."""
    num_tokens = len(prompt.token_ids)
    return Completion(prompt.token_ids, [0.0] * num_tokens, "stop", (VersionSpan(0, 0, num_tokens),), text)


def run_trial(pipe: Connection, argument: tuple[int, Callable[[list[str]], Rewards]]) -> None:
    """The process: answers each job with its outcome, until the pipe is closed."""
    parent_pid, make = argument
    die_with_parent(parent_pid)
    made: dict[str, Rewards] = {}
    with suppress(EOFError), asyncio.Runner() as runner:
        while True:
            fn, prompt, completion = pipe.recv()
            try:
                if fn not in made:
                    made[fn] = make([fn])
                    made[fn].start()
                (outcome,) = runner.run(made[fn].score(prompt, [completion]))
            except (Exception, SystemExit) as error:  # it cannot be loaded here
                outcome = f"{type(error).__name__}: {error}"
            pipe.send(outcome)
