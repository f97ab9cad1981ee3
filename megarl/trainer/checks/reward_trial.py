"""Reads the prompts of a run and tries its rewards on a few of them: one that cannot work stops it in seconds.

The rewards run in a process like that of a collector, with the same few variables of the environment.  Judges and
reward models are not asked: their servers may not be there yet.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

from megarl.config import Config
from megarl.config.names import AUTO, REWARDS_OF_CODE
from megarl.config.validate.rewards import names_of
from megarl.data.prompts import PromptRow, Prompts
from megarl.io.job_signals import leave_to_driver
from megarl.io.terminal import one_line
from megarl.metrics.trackers.console import note, warn
from megarl.plugins.load import is_async
from megarl.processes import watchdog
from megarl.processes.child import end_session, start_child
from megarl.processes.lifetime import die_with_parent
from megarl.processes.programs import Program
from megarl.rewards import REWARDS, SERVICES, load_reward
from megarl.rewards.functions.auto import reward_of
from megarl.rewards.result import Outcome
from megarl.rewards.scorer import Rewards, RewardSettings
from megarl.samples.sample import Completion, Prompt, VersionSpan, text_of
from megarl.trainer.build import plugins, read_prompts, shortened
from megarl.trainer.checks.rewards import Need, check_truths, need_of, rewards_of, say_chosen
from megarl.trainer.collectors import surroundings

PATIENCE_S = 60.0  # more than an ordinary reward's own limit: its first call may load what it needs
QUIET_S = 10.0  # before a line says what is waited for
ANSWER = "0"  # to a row without ground truth
# What each built-in reward looks for; the others, and those of users, are given the bare ground truth.
RIGHT = dict.fromkeys(("gsm8k", "gsm8k_strict", "gsm8k_verl"), "#### {}")
RIGHT |= dict.fromkeys(("math", "math_verl"), r"\boxed{{{}}}") | dict.fromkeys(("math_dapo", "choice"), "Answer: {}")
SENTENCE = "So the answer is {}."  # as a model says it that was asked in a chat
# A model gives such answers, too: nothing; the beginning of what the reward looks for, in no language's words; and the
# same again and again until the limit, where a reward of quadratic time shows.
ODD_ANSWERS = ("", "¿? … ничего 没有 <answer>\\boxed{ ```", "1 (" * 2**14)
_SHOWN = 60  # characters of an answer


def read_and_try(
    config: Config, keys: Sequence[str], warn: Callable[[str], None], note: Callable[[str], None]
) -> list[Prompts]:
    """The prompts of the files of each key, data.train_files or data.val_files; the rewards are tried on some of them.

    `warn` and `note` get a line on what was left out, and on how rewards were chosen.
    """
    data, read = config.data, list[Prompts]()
    with RewardTrial(config) as trial:
        for key in keys:
            trains = key == "data.train_files"
            files = data.train_files if trains else data.val_files
            read.append(read_prompts(config, files, max_rows=data.train_max_samples if trains else None))
        for key, prompts in zip(keys, read, strict=True):
            counted = None if key == "data.train_files" else data.val_max_samples
            if line := shortened(key, config, prompts, counted):
                warn(line)
        say_chosen(config, [question for prompts in read for question in prompts.questions], note)
        check_truths(config, read)
        trial.check([row for prompts in read for row in prompts.some(config.reward.try_rows)])
    return read


class Job(NamedTuple):
    """One call of a reward."""

    fn: str
    prompt: Prompt
    completion: Completion


@dataclass
class _Paid:
    """What one reward paid, with the first example of each: (row, answer, reward)."""

    empty: float = 0.0
    right: list[tuple[str, str, float]] = field(default_factory=list)
    in_a_sentence: list[tuple[str, str, float]] = field(default_factory=list)


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
        self._async: set[str] = set()
        functions = [fn for fn in names_of(config) if fn not in SERVICES]
        if not reward.try_rows or not functions or config.has_agents:
            return
        # Those of files and plug-ins: no built-in function is async, and this process need not import them.
        mine = [fn for fn in functions if not isinstance(REWARDS.get(fn), str)]
        self._async = {fn for fn in mine if is_async(load_reward(fn))}
        settings = RewardSettings(num_workers=0, plugins=plugins(config))
        make = partial(Rewards, settings=settings, surroundings=surroundings(config))
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

    def check(self, rows: Sequence[PromptRow]) -> None:
        """Call the rewards of each row with the right answer, and once each with ODD_ANSWERS.

        Warns of a reward that pays the right answer no more than an empty one, and says so of one that pays the right
        word of a chat only without a sentence around it.  What a reward says of odd answers does not matter else, nor
        whether it raises with reward.on_error=zero, which expects it.
        Raises ValueError, naming row and reward, for the first one that fails.  One that takes too long is named in a
        warning, and the rest is not tried: it may wait for a service that starts later.  One that answers, but after
        the limit of the run, is named in a warning too, unless that was its first call.
        """
        expects_errors = self._config.reward.on_error == "zero"
        odd = ODD_ANSWERS[:1] if expects_errors else ODD_ANSWERS
        paid: dict[str, _Paid] = {}
        late: set[str] = set()
        calls: Counter[str] = Counter()
        for where, prompt in rows if self._process is not None else ():
            fns = [fn for fn in rewards_of(prompt.data_source, self._config) if fn not in SERVICES]
            jobs = [(fn, answer) for fn in fns for answer in (*_right(fn, prompt), *(() if fn in paid else odd))]
            for fn, answer in jobs:
                on = f"{where}{' (it has no ground truth)' if prompt.ground_truth is None else ''}"
                on = f"{on} with the answer {_short(answer)}"
                outcome, seconds = self._ask(Job(fn, prompt, stand_in(prompt, answer)), on)
                if outcome is None:
                    return warn(f"reward {fn} did not answer within {seconds:g} s when it was tried on {on}")
                if isinstance(outcome, str) and expects_errors and answer in odd:
                    continue
                if isinstance(outcome, str):
                    raise ValueError(
                        f"reward.fn={fn}: tried on {on} it failed: {one_line(outcome)}; "
                        "reward.try_rows=0 starts a run without this trial"
                    )
                _note_pay(paid.setdefault(fn, _Paid()), where, prompt, answer, outcome.reward)
                calls[fn] += 1
                limit_s = self._config.reward.timeout_s
                if seconds > limit_s and calls[fn] > 1 and fn not in late | self._async:
                    late.add(fn)
                    cut = f"the run cuts it off there after reward.timeout_s={limit_s:g}"
                    warn(f"reward {fn} took {seconds:.1f} s when it was tried on {on}: {cut}")
        for fn, found in paid.items():
            if fn not in REWARDS_OF_CODE and need_of(fn, self._config) is not Need.NEVER:
                _say_unpaid(fn, found)

    def _ask(self, job: Job, on: str) -> tuple[Outcome | None, float]:
        """The outcome and its seconds; None after the limit.  `on`: what it is tried on."""
        assert self._process is not None, "there is something to try"
        reward = self._config.reward
        began = time.monotonic()
        is_told = False
        limit_s = reward.request_timeout_s if job.fn in self._async else PATIENCE_S + reward.timeout_s
        with suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send(job)
        while not self._pipe.poll(1.0):
            watchdog.heartbeat()
            waited = time.monotonic() - began
            if waited > QUIET_S and not is_told:
                is_told = True
                note(f"waiting for reward {job.fn}, which is tried on {on}, for up to {limit_s:g} s")
            if waited > limit_s:
                return None, limit_s
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            return f"its process died with exit code {self._process.wait()}", 0.0


def _right(fn: str, prompt: Prompt) -> list[str]:
    """The answers with the ground truth that a reward is tried with: in its own form, and for a chat in a sentence."""
    if prompt.ground_truth is None:
        return [ANSWER]
    truth = text_of(prompt.ground_truth)
    name = reward_of(prompt.data_source, prompt.extra, prompt.ground_truth) if fn == AUTO else fn
    return [RIGHT.get(name, "{}").format(truth)] + [SENTENCE.format(truth)] * isinstance(prompt.text, list)


def _note_pay(paid: _Paid, where: str, prompt: Prompt, answer: str, reward: float) -> None:
    if not answer:
        paid.empty = reward
    elif prompt.ground_truth is not None and answer not in ODD_ANSWERS:
        is_sentence = answer == SENTENCE.format(text_of(prompt.ground_truth))
        (paid.in_a_sentence if is_sentence else paid.right).append((where, answer, reward))


def _say_unpaid(fn: str, paid: _Paid) -> None:
    """Warn of right answers that get no more than an empty one; say so of those in a sentence."""
    unpaid = [one for one in paid.right if one[2] <= paid.empty]
    if unpaid:
        where, answer, reward = unpaid[0]
        warn(
            f"reward {fn} pays the ground truth of {len(unpaid)} of {len(paid.right)} tried rows no more than an empty "
            f"answer: {_short(answer)}, the answer to {where}, gets {reward:g}"
        )
    unpaid = [one for one in paid.in_a_sentence if one[2] <= paid.empty]
    if unpaid and (bare := next((one for one in paid.right if one[0] == unpaid[0][0] and one[2] > paid.empty), None)):
        form = "the bare ground truth" if bare[1] in unpaid[0][1] else "that form"
        asks = f"a model has to be asked for {form}"
        note(f"reward {fn} pays for {_short(bare[1])} and not for {_short(unpaid[0][1])} ({bare[0]}): {asks}")


def _short(answer: str) -> str:
    return repr(answer) if len(answer) <= _SHOWN else f"{answer[:_SHOWN]!r}... of {len(answer)} characters"


def stand_in(prompt: Prompt, text: str) -> Completion:
    """An answer that no model generated; its tokens are those of the prompt, so that there are some."""
    num_tokens = len(prompt.token_ids)
    return Completion(prompt.token_ids, [0.0] * num_tokens, "stop", (VersionSpan(0, 0, num_tokens),), text)


def run_trial(pipe: Connection, argument: tuple[int, Callable[[list[str]], Rewards]]) -> None:
    """The process: answers each job with its outcome and the seconds that it took, until the pipe is closed."""
    parent_pid, make = argument
    die_with_parent(parent_pid)
    leave_to_driver(runs_users_code=True)
    made: dict[str, Rewards] = {}
    with suppress(EOFError), asyncio.Runner() as runner:
        while True:
            fn, prompt, completion = pipe.recv()
            began = time.monotonic()
            try:
                if fn not in made:
                    made[fn] = make([fn])
                    made[fn].start()
                (outcome,) = runner.run(made[fn].score(prompt, [completion]))
            except (Exception, SystemExit) as error:  # it cannot be loaded here
                outcome = f"{type(error).__name__}: {error}"
            pipe.send((outcome, time.monotonic() - began))
