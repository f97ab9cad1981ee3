"""All rewards of a run: which ones score a row, how they are joined, and what becomes of a sample without a reward."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import megarl_sandbox
from megarl.plugins.load import describe, is_async, load_plugins
from megarl.rewards import RewardFn, load_reward, name_of
from megarl.rewards.functions.auto import with_pred
from megarl.rewards.pool import RewardError, RewardPool
from megarl.rewards.result import Outcome, RewardResult, joined, to_result
from megarl.rewards.services.limit import Limit, ServiceError
from megarl.rewards.surroundings import Surroundings
from megarl.samples.float32 import EXPECTED, is_finite
from megarl.samples.sample import AUDIT, AUDIT_ERROR, REWARD_ERROR, Completion, Prompt

log = logging.getLogger(__name__)

MAX_LOGGED = 10  # logged errors of each kind; all are counted
TRAINED = "trained"  # the kind of an error of a trained reward; that of one of the audit is AUDIT
ON_ERROR = ("unscored", "zero", "stop")

AsyncReward = Callable[[Prompt, Completion], Awaitable[Any]]


@dataclass(frozen=True)
class RewardSettings:
    """How rewards are joined and computed."""

    weights: Mapping[str, float] = field(default_factory=dict)  # by short name, see name_of; a missing one is 1
    by_data_source: Mapping[str, str] = field(default_factory=dict)  # the reward of a row of this data source, instead
    # One more reward, whose number is the extra number AUDIT and counts for nothing else; where it fails there is
    # AUDIT_ERROR instead.
    audit: str | None = None
    num_workers: int = 1  # processes of ordinary functions; 0: these run in the caller's process, without a time limit
    timeout_s: float = 5.0  # of a sample in such a process
    # What becomes of a sample on which a reward failed.  unscored: its outcome says why it has none; zero: it has
    # reward 0 and the extra number REWARD_ERROR; stop: RewardError is raised.
    on_error: str = "unscored"
    plugins: Sequence[str] = ()

    def __post_init__(self) -> None:
        assert self.on_error in ON_ERROR, f"on_error is {self.on_error!r}, expected one of {', '.join(ON_ERROR)}"


class Rewards:
    """The rewards `fns`, weighted and added.

    Example:

        rewards = Rewards(["math", "my/file.py:tidy"], RewardSettings(weights={"tidy": 0.1}))
        rewards.start()
        outcomes = await rewards.score(prompt, completions)
        rewards.stop()

    Ordinary functions run in processes.  Async functions run in the event loop of the caller, each under a limit of its
    own from `make_limit`; so do `services`, which makes the rewards of these names: f(limit=...).
    `surroundings`: limits and further variables of the processes; async functions have these variables, too.
    The constructor raises ValueError if a reward does not exist.  `num_errors` counts the samples that failed, those of
    TRAINED and of AUDIT apart; `first_errors` says why the first one of each kind did.
    """

    def __init__(
        self,
        fns: Sequence[str],
        settings: RewardSettings = RewardSettings(),
        *,
        make_limit: Callable[[], Limit] = Limit,
        services: Mapping[str, Callable[..., AsyncReward]] | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.num_errors: Counter[str] = Counter()
        self.first_errors: dict[str, str] = {}
        self._fns = tuple(fns)
        self._settings = settings
        self._surroundings = surroundings or Surroundings()
        trained = list(dict.fromkeys([*fns, *settings.by_data_source.values()]))
        self._is_alone, self._audits = len(trained) == 1, [] if settings.audit is None else [settings.audit]
        self._all = [*trained, *self._audits]
        os.environ.update(self._surroundings.environment)  # a reward's file may look at them when it is imported
        load_plugins(settings.plugins)
        made = {fn: make(limit=make_limit()) for fn, make in (services or {}).items() if fn in self._all}
        self._functions = {fn: load_reward(fn) for fn in self._all if fn not in made}
        self._async = made | {
            fn: _limited(make_limit(), function) for fn, function in self._functions.items() if is_async(function)
        }
        ordinary = [fn for fn in self._all if fn not in self._async]
        self._pool: RewardPool | None = None
        if ordinary and settings.num_workers:
            self._pool = RewardPool(
                ordinary, settings.num_workers, settings.timeout_s, settings.plugins, self._surroundings
            )

    def start(self) -> None:
        megarl_sandbox.use(self._surroundings.sandbox)
        if self._pool is not None:
            self._pool.start()

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Outcome]:
        """The outcomes of one group, in order: a reward, or a sentence that says why there is none.

        Raises RewardError, naming reward and sample, for the first failure with on_error="stop".
        """
        chosen = self._settings.by_data_source.get(prompt.data_source)
        fns = self._fns if chosen is None else [chosen]
        audited = (*fns, *self._audits)
        columns = await asyncio.gather(*(self._column(fn, prompt, completions) for fn in audited))
        return [
            self._audited(f"{prompt.uid}#{index}", dict(zip(audited, outcomes, strict=True)))
            for index, outcomes in enumerate(zip(*columns, strict=True))
        ]

    async def _column(self, fn: str, prompt: Prompt, completions: Sequence[Completion]) -> list[Outcome]:
        """The outcomes of one reward."""
        if fn in self._async:
            return await asyncio.gather(*(_awaited(self._async[fn], prompt, each) for each in completions))
        if self._pool is None:
            return [_called(fn, self._functions[fn], prompt, completion) for completion in completions]
        return await self._pool.score(fn, prompt, completions)

    def _audited(self, uid: str, outcomes: Mapping[str, Outcome]) -> Outcome:
        """The outcome of one sample from those of its rewards, with the number of the audit."""
        whole = self._outcome(uid, {fn: outcome for fn, outcome in outcomes.items() if fn not in self._audits})
        for fn in self._audits:
            audit = outcomes[fn]
            if isinstance(audit, str):
                self._log(AUDIT, f"reward.audit {fn}, sample {uid}: {audit}", "it has no audit")
            if isinstance(whole, RewardResult):
                found = {AUDIT_ERROR: 1.0} if isinstance(audit, str) else {AUDIT: audit.reward}
                whole = replace(whole, extra=whole.extra | found)
        return whole

    def _outcome(self, uid: str, outcomes: Mapping[str, Outcome]) -> Outcome:
        """The outcome of one sample from those of its rewards."""
        results = {fn: outcome for fn, outcome in outcomes.items() if isinstance(outcome, RewardResult)}
        failed = [f"reward {fn}, sample {uid}: {outcome}" for fn, outcome in outcomes.items() if fn not in results]
        if failed:
            return self._failed(failed[0])
        if self._is_alone:
            return next(iter(results.values()))
        whole = joined({name_of(fn): result for fn, result in results.items()}, self._settings.weights)
        if not is_finite(whole.reward):
            return self._failed(f"sample {uid}: the weighted sum of its rewards is {whole.reward}; {EXPECTED}")
        return whole

    def _failed(self, sentence: str) -> Outcome:
        if self._settings.on_error == "stop":
            self.num_errors[TRAINED] += 1
            raise RewardError(sentence)
        self._log(TRAINED, sentence, "counted as 0" if self._settings.on_error == "zero" else "it leaves its group")
        return RewardResult(0.0, {REWARD_ERROR: 1.0}) if self._settings.on_error == "zero" else sentence

    def _log(self, kind: str, sentence: str, what: str) -> None:
        self.num_errors[kind] += 1
        self.first_errors.setdefault(kind, f"{sentence}; {what}")
        if self.num_errors[kind] <= MAX_LOGGED:
            more = "; further errors are only counted" if self.num_errors[kind] == MAX_LOGGED else ""
            log.warning("%s; %s%s", sentence, what, more)


async def _awaited(reward: AsyncReward, prompt: Prompt, completion: Completion) -> Outcome:
    try:
        return to_result(await reward(prompt, completion))
    except ServiceError as error:
        return str(error)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        return "a part of the reward was cancelled, by the reward itself"
    except Exception as error:
        return describe(error, reward)


def _called(fn: str, reward: RewardFn, prompt: Prompt, completion: Completion) -> Outcome:
    try:
        return with_pred(fn, prompt, completion, to_result(reward(prompt, completion)))
    except Exception as error:
        return describe(error, reward)


def _limited(limit: Limit, function: AsyncReward) -> AsyncReward:
    @wraps(function)
    async def limited(prompt: Prompt, completion: Completion) -> Any:
        return await limit(lambda: function(prompt, completion))

    return limited
