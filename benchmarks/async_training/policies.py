"""Rules by which a trainer takes what servers wrote, over the same collectors: megarl's two orders, and controls.

    order=prompts    visits strictly in order: an iteration waits for its slowest answer
    order=finished   of what is finished the lowest visits; nothing is dropped
    drop             control: a group whose weights are more than `ahead` pushes old is thrown away, also while it runs
    requeue          control: the same, and its prompt is asked again
    first of 1.5 B   control: half as many again are asked, the first B are taken, and the rest is thrown away

All but the last have at most (ahead + 1) B visits outstanding, admitted when the trainer begins to wait.  The classes
are short on purpose: tests compare `megarl.rollout.prefetch.Prefetcher` with the first two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from benchmarks.async_training.virtual_rollout import VirtualCollectors
from megarl.rollout.protocol import SamplingParams
from megarl.samples.sample import Prompt, Sample

PROMPTS, FINISHED, DROP, REQUEUE, FIRST = "prompts", "finished", "drop", "requeue", "first of 1.5 B"
OVER = 1.5
FOREVER_S = 1e12

Group = Sequence[Sample]


class Policy(Protocol):
    def ready(self, timeout_s: float = 1.0) -> bool: ...

    def take(self) -> Any: ...  # has `groups`


@dataclass
class Taken:
    """The groups of an iteration."""

    groups: list[Group]


@dataclass(eq=False)
class Visit:
    number: int
    ticket: Any
    step: int  # at which it was asked


class Rule:
    """All rules above but the prefetcher itself."""

    def __init__(
        self,
        name: str,
        collectors: Any,
        prompts: Any,
        *,
        num_prompts: int,
        n: int,
        params: SamplingParams,
        ahead: int,
        first_step: int = 0,
    ) -> None:
        self.name, self._collectors, self._prompts = name, collectors, prompts
        self._num_prompts, self._n, self._params, self._ahead = num_prompts, n, params, ahead
        self._step, self._next = first_step, 0
        self._visits: list[Visit] = []  # outstanding ones
        self._waits = False
        self.lost = 0  # visits that were thrown away
        self.wasted = 0  # tokens of finished groups that were thrown away

    def ready(self, timeout_s: float = 1.0) -> bool:
        if not self._waits:
            self._waits = True
            self._collectors.wait(0.0)  # what came while the driver trained may be the lowest
            self._expire()
            self._admit()
        if self._chosen() is not None:
            return True
        self._collectors.wait(timeout_s)
        return False  # the next call looks

    def take(self) -> Taken:
        chosen = self._chosen()
        assert chosen is not None, "an iteration is taken when it is ready"
        gone = set(chosen)
        self._visits = [visit for visit in self._visits if visit not in gone]
        if self.name == FIRST:
            self._throw_away(self._visits)
            self.lost += len(self._visits)
            self._visits.clear()
        self._step, self._waits = self._step + 1, False
        return Taken([visit.ticket.group for visit in chosen])

    def _chosen(self) -> list[Visit] | None:
        """The next iteration, if it is complete."""
        finished = [visit for visit in self._visits if visit.ticket.group is not None]
        if len(finished) < self._num_prompts:
            return None
        found = sorted(finished, key=lambda visit: visit.number)[: self._num_prompts]
        if self.name == PROMPTS and {v.number for v in found} != set(self._lowest(self._num_prompts)):
            return None
        return found

    def _lowest(self, count: int) -> list[int]:
        return sorted(visit.number for visit in self._visits)[:count]

    def _admit(self) -> None:
        most = int(OVER * self._num_prompts) if self.name == FIRST else (self._ahead + 1) * self._num_prompts
        count = most - len(self._visits)
        self._ask(range(self._next, self._next + count))
        self._next += count

    def _ask(self, numbers: Sequence[int]) -> None:
        prompts = [self._prompts.visit(number) for number in numbers]
        tickets = self._collectors.submit(prompts, n=self._n, params=self._params)
        self._visits += [Visit(n, ticket, self._step) for n, ticket in zip(numbers, tickets, strict=True)]

    def _expire(self) -> None:
        if self.name not in (DROP, REQUEUE):
            return
        old = [visit for visit in self._visits if self._step - visit.step > self._ahead]
        self._visits = [visit for visit in self._visits if self._step - visit.step <= self._ahead]
        self._throw_away(old)
        if self.name == REQUEUE:
            self._ask([visit.number for visit in old])
        else:
            self.lost += len(old)

    def _throw_away(self, visits: Sequence[Visit]) -> None:
        self._collectors.cancel([visit.ticket for visit in visits])
        groups = [visit.ticket.group for visit in visits if visit.ticket.group is not None]
        self.wasted += sum(sample.num_learnt for group in groups for sample in group)


@dataclass
class Outcome:
    """A simulated run, without its first steps."""

    seconds: float = 0.0
    steps: int = 0
    waited_s: float = 0.0
    lengths: list[int] = field(default_factory=list)  # of all completions that were trained
    ages: dict[int, int] = field(default_factory=dict)  # pushes since a token was written -> tokens
    visits: list[int] = field(default_factory=list)  # trained ones, the first steps included
    start_lag_max: int = 0  # pushes since the oldest visit of an iteration was begun
    servers_idle_share: float = 0.0
    wasted_share: float = 0.0  # of the tokens that were written

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def idle_share(self) -> float:
        """Of the trainer's time."""
        return self.waited_s / self.seconds

    def age(self, share: float) -> int:
        """So many of the trained tokens are at most so old.  Example: age(0.99)"""
        left = share * sum(self.ages.values())
        for age in sorted(self.ages):
            left -= self.ages[age]
            if left <= 0:
                return age
        return max(self.ages, default=0)

    @property
    def age_mean(self) -> float:
        return sum(age * count for age, count in self.ages.items()) / max(1, sum(self.ages.values()))

    def distance(self, law: np.ndarray) -> float:
        """Kolmogorov-Smirnov distance of the trained lengths from all of `law`."""
        return ks_distance(np.asarray(self.lengths), law.ravel())

    def longest(self, law: np.ndarray, share: float = 0.05) -> float:
        """How often the longest of the law were trained, over how often they should be; 1 is fair."""
        limit = np.quantile(law, 1 - share)
        return float((np.asarray(self.lengths) > limit).mean() / max(1e-12, (law > limit).mean()))

    def mean_length(self, law: np.ndarray) -> float:
        """Mean length of what was trained over that of the law."""
        return float(np.mean(self.lengths) / law.mean())


def ks_distance(found: np.ndarray, law: np.ndarray) -> float:
    """Largest difference of the two cumulative distributions."""
    found, law = np.sort(found), np.sort(law)
    at = np.union1d(found, law)
    below = (np.searchsorted(each, at, side="right") / len(each) for each in (found, law))
    return float(np.max(np.abs(next(below) - next(below))))


def simulate(
    policy: Policy,
    collectors: VirtualCollectors,
    *,
    train_s: float,
    steps: int,
    warmup: int = 0,
    first_version: int = 0,
    on_step: Callable[[int], object] = lambda step: None,
) -> Outcome:
    """A driver's loop in virtual time: wait for an iteration, train it for `train_s`, push the next version in place.

    The first `warmup` of the steps count for nothing but `visits`.
    """
    found = Outcome()
    wasted_before, tokens_before, begun = 0.0, 0.0, collectors.now
    for step in range(steps):
        if step == warmup:
            begun, tokens_before = collectors.now, collectors.counters["tokens"]
            wasted_before = _wasted(collectors, policy)
        waits = collectors.now
        while not policy.ready(FOREVER_S):
            pass
        waited = collectors.now - waits
        groups = policy.take().groups
        found.visits += [_visit(group[0].prompt) for group in groups]
        if step >= warmup:
            found.waited_s += waited
            _add(found, groups, first_version + step)
        collectors.sleep(train_s)
        collectors.push(first_version + step + 1)
        on_step(step)
    found.seconds, found.steps = collectors.now - begun, steps - warmup
    tokens = collectors.counters["tokens"] - tokens_before
    places = len(collectors.urls) * collectors.max_running * collectors.tokens_per_s
    found.servers_idle_share = 1 - tokens / (found.seconds * places)
    found.wasted_share = (_wasted(collectors, policy) - wasted_before) / max(1.0, tokens)
    return found


def _visit(prompt: Prompt) -> int:
    return int(prompt.extra["visit"])


def _wasted(collectors: VirtualCollectors, policy: Policy) -> float:
    by_servers = sum(count for name, count in collectors.counters.items() if name.startswith("wasted_"))
    return by_servers + getattr(policy, "wasted", 0)


def _add(found: Outcome, groups: Sequence[Group], version: int) -> None:
    for group in groups:
        for sample in group:
            versions = sample.versions
            found.lengths.append(sample.num_learnt)
            for span in versions:
                age = version - span.version
                found.ages[age] = found.ages.get(age, 0) + span.end - span.start
            if versions:
                found.start_lag_max = max(found.start_lag_max, version - versions[0].version)
