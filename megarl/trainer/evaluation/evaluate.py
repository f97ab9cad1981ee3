"""The score of a model on held-out prompts, through the same servers and rewards as the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.metrics.computing.audit import Audit
from megarl.metrics.computing.evaluation import (
    ACC,
    CLIP_RATIO,
    REWARD,
    Answers,
    Mean,
    is_accuracy,
    is_share,
    set_metrics,
)
from megarl.metrics.reading.jsonl import read_lines
from megarl.rollout.collector.collector_client import Collectors, Ticket
from megarl.rollout.protocol import SamplingParams
from megarl.samples.sample import AUDIT, AUDIT_ERROR, REWARD_ERROR, LostRollout, Prompt, Sample

EVALUATIONS = "evaluations.jsonl"  # a line for each evaluation, see Evaluation.line
_TRIES = 3  # to get all replies of one version of the weights


@dataclass(frozen=True)
class Evaluation:
    """The groups in the order of the prompts; a lost group scores 0, one that could not be scored does not count.

    What counts and does not say whether it is right, where other answers of its set do, is not right: a lost prompt,
    an answer whose reward failed and was counted as 0, one for which the reward returned no `acc`.
    """

    groups: list[list[Sample] | LostRollout]
    n: int = 1  # completions that were asked for, of each prompt
    sets: Sequence[str] = ()  # of each prompt; empty: there are no named sets
    version: int | None = None  # of the weights that generated every reply; None: there is no reply

    @property
    def mean(self) -> Mean:
        """Over prompts of the mean reward of their completions; 0 without prompts."""
        scores = self.scores
        return Mean.of(scores) if scores else Mean(0.0, math.nan)

    @property
    def scores(self) -> list[float]:
        """The mean reward of each prompt that counts."""
        return [_mean(numbers.numbers[REWARD]) for numbers in self._answers() if numbers.numbers]

    @property
    def is_share(self) -> bool:
        """Whether every reward is 0 or 1, so that the mean reward is the share of right answers: an accuracy."""
        return is_share(number for answers in self._answers() for number in answers.numbers.get(REWARD, ()))

    @property
    def has_acc(self) -> bool:
        """Whether the reward says of answers, as the number `acc`, whether they are right."""
        return any(ACC in answers.numbers for answers in self._answers())

    @property
    def accuracy(self) -> Mean | None:
        """The share of right answers: of the numbers `acc` in sets that have them, of the rewards in others.

        None if these are not just 0 and 1.
        """
        found = [answers.numbers for answers in self._answers() if answers.numbers]
        shares = [numbers.get(ACC, numbers[REWARD]) for numbers in found]
        if not all(map(is_share, shares)):
            return None
        return Mean.of([_mean(each) for each in shares]) if shares else Mean(0.0, math.nan)

    @property
    def samples(self) -> list[Sample]:
        """All answers that were scored."""
        return [sample for group in self.groups if not isinstance(group, LostRollout) for sample in group]

    @property
    def audits(self) -> tuple[int, int]:
        """(answers on which reward.audit failed, answers on which it was called)."""
        extras = [sample.reward_extra for sample in self.samples]
        failed = sum(AUDIT_ERROR in extra for extra in extras)
        return failed, failed + sum(AUDIT in extra for extra in extras)

    def metrics(self) -> dict[str, float]:
        """val/score and its error, val/lost prompts, val/unscored completions, val/version; those of each set.

        val/response_length/mean: tokens of the answers; val/clip_ratio: the share of them that a limit ended.
        With an audit also audit/failed, the answers on which it failed.
        val/lost: prompts that the servers lost, each of which scores 0; one that no reward could score is none of them.
        """
        mean = self.mean
        unscored = sum(g.unscored if isinstance(g, LostRollout) else self.n - len(g) for g in self.groups)
        out = {"val/score": mean.value, "val/unscored": float(unscored)}
        if math.isfinite(mean.stderr):
            out["val/score_stderr"] = mean.stderr
        if samples := self.samples:
            out["val/response_length/mean"] = _mean([float(sample.response_length) for sample in samples])
            out[CLIP_RATIO] = _mean([float(sample.truncated) for sample in samples])
        out["val/lost"] = float(sum(isinstance(g, LostRollout) and not g.unscored for g in self.groups))
        if self.version is not None:
            out["val/version"] = float(self.version)
        failed, audited = self.audits
        if audited:
            out["audit/failed"] = float(failed)
        by_set: dict[str, list[Answers]] = {}
        for name, answers in zip(self.sets, self._answers(), strict=bool(self.sets)):
            by_set.setdefault(name, []).append(answers)
        for name, of_set in sorted(by_set.items()):
            out |= set_metrics(name, of_set, self.n)
        return out

    def audited(self) -> dict[str, tuple[float, float]]:
        """uid -> (mean reward, mean audit) of each prompt whose answers all have an audit."""
        both = (
            (_prompt(group).uid, answers.numbers) for group, answers in zip(self.groups, self._answers(), strict=True)
        )
        return {
            uid: (_mean(numbers[REWARD]), _mean(numbers[AUDIT]))
            for uid, numbers in both
            if AUDIT in numbers and len(numbers[AUDIT]) == len(numbers[REWARD])
        }

    def line(self, step: int) -> dict[str, Any]:
        """{"step", "version", "n", the metrics, "prompts": [{"uid", "set", "reward": [...], ...}]}"""
        prompts = [
            {"uid": _prompt(group).uid, "set": name, **answers.numbers}
            for group, name, answers in zip(self.groups, self.sets, self._answers(), strict=bool(self.sets))
        ]
        return {"step": step, "version": self.version, "n": self.n, **self.metrics(), "prompts": prompts}

    def answers(self) -> list[dict[str, Any]]:
        """The first completion of each prompt: {uid, text, reward}."""
        return [
            {"uid": _prompt(g).uid, "text": "", "reward": 0.0}
            if isinstance(g, LostRollout)
            else {"uid": g[0].prompt.uid, "text": g[0].text, "reward": g[0].reward}
            for g in self.groups
        ]

    def _answers(self) -> list[Answers]:
        sets = self.sets or [""] * len(self.groups)
        of_all: dict[str, set[str]] = {name: set() for name in sets}
        for name, group in zip(sets, self.groups, strict=True):
            samples = [] if isinstance(group, LostRollout) else group
            of_all[name] |= {extra for sample in samples for extra in sample.reward_extra if _is_of_all(extra)}
        return [_answers(group, self.n, of_all[name]) for name, group in zip(sets, self.groups, strict=True)]


def _is_of_all(extra: str) -> bool:
    """Whether an answer that counts has 0 where it lacks this number: others are means over those that have them."""
    return is_accuracy(extra) or extra in (REWARD_ERROR, AUDIT_ERROR)


def _answers(group: list[Sample] | LostRollout, n: int, of_all: set[str]) -> Answers:
    """What the completions of one prompt got; nothing if none could be scored.  `of_all`: what none of them lacks."""
    if isinstance(group, LostRollout):
        return Answers({}) if group.unscored else Answers({name: [0.0] * n for name in (REWARD, *of_all)}, [""] * n)
    numbers = {REWARD: [sample.reward for sample in group]}
    for name in sorted(of_all.union(*(sample.reward_extra for sample in group))):
        having = [sample for sample in group if name in of_all or name in sample.reward_extra]
        numbers[name] = [sample.reward_extra.get(name, 0.0) for sample in having]
    return Answers(numbers, [sample.pred for sample in group])


def read_audit(file: Path) -> Audit:
    """The audit of a run with these evaluations so far, as after the last of them."""
    audit = Audit()
    for line in read_lines(file) if file.exists() else ():
        numbers = [(prompt["uid"], prompt.get(REWARD, ()), prompt.get(AUDIT, ())) for prompt in line["prompts"]]
        audit.look({uid: (_mean(r), _mean(a)) for uid, r, a in numbers if a and len(a) == len(r)})
    return audit


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _prompt(group: list[Sample] | LostRollout) -> Prompt:
    return group.prompt if isinstance(group, LostRollout) else group[0].prompt


class EvaluationLost(RuntimeError):
    """No prompt has a score; `by_rewards`: all of them have answers, which no reward could score."""

    def __init__(self, sentence: str, *, by_rewards: bool) -> None:
        super().__init__(sentence)
        self.by_rewards = by_rewards


def _versions(group: list[Sample] | LostRollout | None) -> set[int]:
    """The versions of the weights that generated a token of the group."""
    if group is None or isinstance(group, LostRollout):
        return set()
    return {span.version for sample in group for span in sample.versions}


class Evaluator:
    """Generates completions of held-out prompts: data.val_* and rollout.val_kwargs say which and how many of each.

    Example:

        evaluator.submit(version=7)           # to the servers, which hold these weights now
        while not evaluator.ready():
            ...                               # check the servers
        found = evaluator.take()
    """

    def __init__(
        self, collectors: Collectors, prompts: Sequence[Prompt], config: Config, sets: Sequence[str] = ()
    ) -> None:
        """`sets`: the name of the evaluation set of each prompt."""
        val = config.rollout.val_kwargs
        self._collectors = collectors
        self.prompts = prompts
        self._n = val.n
        self._sets = sets
        self._params = SamplingParams(
            temperature=val.temperature,
            top_p=val.top_p,
            max_new_tokens=val.max_response_length,
            sampling_seed=config.rollout.seed,
        )
        self._tickets: list[Ticket] = []
        self._version: int | None = None
        self._tries = 0

    def submit(self, version: int | None = None) -> None:
        """Start generation, before all that is generated ahead: the trainer waits for the evaluation.

        `version`: of the weights that must generate every reply; None: of those that generate the first one.
        """
        self._tickets = self._asked(self.prompts)
        self._version = version
        self._tries = 1

    def ready(self) -> bool:
        """Whether all completions are generated and scored; waits up to 1 s for some of them.

        Prompts whose replies other weights generated are requested again.  Raises RuntimeError if that does not help.
        """
        done, total = self.progress
        if done < total:
            self._collectors.wait()
            done, total = self.progress
        return done == total and self._is_pinned()

    @property
    def progress(self) -> tuple[int, int]:
        """(finished prompts, all prompts)."""
        return sum(ticket.group is not None for ticket in self._tickets), len(self._tickets)

    def take(self) -> Evaluation:
        """The evaluation, once it is ready.  Raises EvaluationLost if every prompt was lost."""
        groups = [ticket.group for ticket in self._tickets if ticket.group is not None]
        assert len(groups) == len(self._tickets), "an evaluation is taken when it is ready"
        lost = [group for group in groups if isinstance(group, LostRollout)]
        if groups and len(lost) == len(groups):
            raise EvaluationLost(
                f"every prompt of the evaluation was lost; the first: {lost[0].reason}",
                by_rewards=all(group.unscored > 0 for group in lost),
            )
        return Evaluation(groups, self._n, self._sets, self._version)

    def cancel(self) -> None:
        """Stop the generation of the completions, which are no longer wanted."""
        self._collectors.cancel(self._tickets)

    def _asked(self, prompts: Sequence[Prompt]) -> list[Ticket]:
        return self._collectors.submit(prompts, n=self._n, params=self._params, urgent=True)

    def _is_pinned(self) -> bool:
        """Whether one version generated all replies; if not, the others are requested again."""
        found = [_versions(ticket.group) for ticket in self._tickets]
        if self._version is None:
            self._version = min(set().union(*found), default=None)
        wrong = [at for at, versions in enumerate(found) if versions - {self._version}]
        if not wrong:
            return True
        if self._tries == _TRIES:
            others = ", ".join(map(str, sorted(set().union(*found) - {self._version})))
            raise RuntimeError(
                f"an evaluation of weights version {self._version} got replies of version {others}, "
                f"{_TRIES} times: its servers do not hold the same weights"
            )
        self._tries += 1
        for at, ticket in zip(wrong, self._asked([self.prompts[at] for at in wrong]), strict=True):
            self._tickets[at] = ticket
        return False
