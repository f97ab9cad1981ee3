"""Prefetch: requests the completions of coming iterations while the driver trains, as many as staleness allows.

At most (ahead + 1) B visits of prompts are outstanding, B an iteration's prompts: running, or finished and waiting.
New ones are admitted only when the driver begins to wait for an iteration, that is after a push.  `ahead=0` is
on-policy.  A group is never dropped for its age: what is too old is decided token by token, by `rollout.max_age`.

`order=finished` takes, of the finished groups, those of the lowest visits: a long answer is trained when it is done.
`order=prompts` takes the visits strictly in order, so an iteration waits for its slowest answer.

Dynamic sampling (`Filter`) drops groups whose rewards are all equal.  With refill, other visits take their places until
the iteration is full.  The ledger settles every visit once: trained, filtered, lost or skipped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megarl.algo.reward_shaping import is_informative
from megarl.data.ledger import FILTERED, LOST, OUTCOMES, SKIPPED, TRAINED, Ledger
from megarl.rollout.collector.collector_client import Ticket
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.usage import Usage
from megarl.sample import OF_AGENTS, REWARD_ERROR, LostRollout, Prompt, Sample, own_name

PROMPTS, FINISHED = "prompts", "finished"

Group = list[Sample]


class PromptSource(Protocol):
    def visit(self, number: int) -> Prompt: ...


class Writers(Protocol):
    """The part of `Collectors` that is used here."""

    def submit(
        self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams, greedy: bool = False
    ) -> list[Ticket]: ...

    def wait(self, timeout_s: float = 1.0) -> bool: ...

    @property
    def counters(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Filter:
    """Which groups dynamic sampling keeps, and whether it replaces the others.  Example: Filter(refill=False)."""

    metric: str = "score"  # the reward, or one of its extra numbers
    refill: bool = True  # visit other prompts for dropped groups
    max_batches: int = 10  # an iteration sees at most so many times its number of prompts

    def keeps(self, group: Sequence[Sample]) -> bool:
        """Whether the metric differs between the group's completions, as float32: so a batch has it."""
        return is_informative([float(np.float32(self._value(sample, at))) for at, sample in enumerate(group)])

    def _value(self, sample: Sample, at: int) -> float:
        if self.metric == "score" or REWARD_ERROR in sample.reward_extra:  # after a reward error it is 0
            return sample.reward
        own = own_name(self.metric)
        if own not in sample.reward_extra:
            has = ", ".join(sample.reward_extra) or "none"
            raise ValueError(
                f"algorithm.filter_groups.metric={self.metric}: the reward of sample {sample.prompt.uid}#{at} has no "
                f"number of that name; expected score or one that reward.fn returns for every sample (here: {has})"
            )
        return sample.reward_extra[own]


@dataclass(frozen=True)
class RolloutBatch:
    """The rollout of one training step."""

    groups: list[Group]
    lost: list[LostRollout]
    visits: dict[str, list[int]] = field(default_factory=dict)  # what became of which: trained, filtered, lost, skipped
    metrics: dict[str, float] = field(default_factory=dict)  # rollout/*, and reward/unscored
    reward_s: float = 0.0  # of the wait for it: everything was generated, and only rewards were missing


@dataclass
class _Seen:
    """What the iteration that is waited for has seen so far."""

    finished: int = 0  # groups, without lost ones
    filtered: int = 0
    lost: list[LostRollout] = field(default_factory=list)
    settled: dict[str, list[int]] = field(default_factory=lambda: {outcome: [] for outcome in OUTCOMES})


class Prefetcher:
    """Requests what iterations first_step .. num_steps - 1 need, each `num_prompts` visits with n completions.

    Example:

        while not prefetcher.ready():
            ...                               # check the servers
        batch = prefetcher.take()

    `waiting`: finished groups of a run that this one continues, by visit.  `greedy`: also a greedy completion of each
    prompt.  `keep`: dynamic sampling; None keeps every group.  `turn_s`: with GPUs that servers and trainer share, an
    iteration is not ready before the servers generated for so long, unless nothing is left to do; `clock` in seconds.
    """

    def __init__(
        self,
        writers: Writers,
        ledger: Ledger,
        prompts: PromptSource,
        *,
        num_prompts: int,
        n: int,
        params: SamplingParams,
        ahead: int,
        order: str,
        first_step: int,
        num_steps: int,
        waiting: Mapping[int, Group] | None = None,
        greedy: bool = False,
        keep: Filter | None = None,
        turn_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert order in (PROMPTS, FINISHED), f"order {order}: expected {PROMPTS} or {FINISHED}"
        self._writers, self._ledger, self._prompts = writers, ledger, prompts
        self._num_prompts, self._n, self._params, self._greedy, self._keep = num_prompts, n, params, greedy, keep
        self._ahead, self._order, self._step, self._num_steps = ahead, order, first_step, num_steps
        self._turn_s, self._clock = turn_s, clock
        # What is outstanding, by visit: each is in one of these.
        self._running: dict[int, Ticket] = {}
        self._arrived: dict[int, Group | LostRollout] = dict(waiting or {})  # not yet looked at
        self._finished: dict[int, Group | LostRollout] = {}  # may be taken
        self._began: dict[int, int] = {}  # visit -> step at which it was admitted
        self._times: dict[int, tuple[float, float]] = {}  # visit -> when all was generated, and when it came
        self._waits_since: float | None = None  # for the next iteration
        self._seen = _Seen()
        self._usage: Usage | None = None  # since the first iteration was waited for
        self._tokens: Counter[str] = Counter()  # of completions: finished and trained, how many and how long
        for group in (waiting or {}).values():
            self._count("generated", group)
        self._unscored = 0  # completions that came since the last iteration was taken

    # ---- what the driver calls

    def ready(self, timeout_s: float = 1.0) -> bool:
        """Whether the next iteration is complete; waits up to `timeout_s` for something to finish.

        The first call of an iteration admits new visits.  Raises RuntimeError if all groups of an iteration were lost,
        or if dynamic sampling keeps too few groups.
        """
        if self._waits_since is None:
            self._waits_since = self._clock()
            self._usage = self._usage or Usage(self._writers.counters)
            self._writers.wait(0.0)  # what came while the driver trained makes room, or is the oldest
            self._look()
            self._admit((self._ahead + 1) * self._num_prompts)
        if not self._is_ready():
            self._writers.wait(timeout_s)
            self._look()
        return self._is_ready()

    def take(self) -> RolloutBatch:
        """The next iteration, once it is ready.  With dynamic sampling without refill it may have no group."""
        assert self._is_ready(), "an iteration is taken when it is ready"
        visits = self._candidates()
        reward_s = self._reward_s(visits)
        settled, found = self._ledger.num_settled, {visit: self._finished.pop(visit) for visit in visits}
        groups: list[Group] = []
        for visit, group in found.items():
            if (self._refills or self._sort_out(visit, group)) and isinstance(group, list):
                groups.append(group)
                self._settle(visit, TRAINED)
                self._count("trained", group)
        lost = self._seen.lost
        if not groups and len(lost) == len(found):
            raise RuntimeError(f"all {len(lost)} prompts of an iteration were lost; the first: {lost[0].reason}")
        metrics = self._metrics(lateness=settled - min(visits))
        outcomes = {outcome: sorted(of_it) for outcome, of_it in self._seen.settled.items()}  # they came in any order
        self._step, self._waits_since, self._seen = self._step + 1, None, _Seen()
        return RolloutBatch(groups, lost, outcomes, metrics, reward_s)

    def skip(self, batch: RolloutBatch, visits: Collection[int]) -> None:
        """These visits of an iteration, which count as trained, were skipped."""
        self._ledger.take_back(visits)
        batch.visits[TRAINED] = [visit for visit in batch.visits[TRAINED] if visit not in visits]
        batch.visits[SKIPPED] += visits

    @property
    def progress(self) -> tuple[int, int]:
        """(groups of the next iteration that are there, all of them)."""
        return len(self._candidates()), self._num_prompts

    @property
    def is_idle(self) -> bool:
        """Whether no completion is being generated."""
        self._receive()
        return not self._running

    def wait(self, timeout_s: float = 1.0) -> None:
        """Wait for something to finish, without admitting anything."""
        self._writers.wait(timeout_s)

    @property
    def waiting(self) -> dict[int, Group]:
        """Finished groups that no iteration has taken yet, by visit: a checkpoint saves them."""
        self._writers.wait(0.0)
        self._receive()
        both = self._finished | self._arrived
        return {visit: group for visit, group in sorted(both.items()) if not isinstance(group, LostRollout)}

    # ---- admission

    @property
    def _refills(self) -> bool:
        return self._keep is not None and self._keep.refill

    @property
    def _num_outstanding(self) -> int:
        return len(self._running) + len(self._arrived) + len(self._finished)

    def _admit(self, most: int) -> None:
        """Admit visits until `most` are outstanding, but no more than the iterations that are left can take.

        In the order of the prompts everything that a resumed run left open is admitted at once, even if this run has a
        smaller lead: finished groups of later visits would overtake what is left out.
        """
        most = min(most, (self._num_steps - self._step) * self._num_prompts)
        again = self._ledger.num_again if self._order == PROMPTS else 0
        bound = max((self._ahead + 1) * self._num_prompts, self._num_outstanding + again)
        visits = self._ledger.issue(max(again, most - self._num_outstanding))
        self._seen.settled[SKIPPED] += self._ledger.passed()
        if not visits:
            return
        asked = self._writers.submit(
            [self._prompts.visit(visit) for visit in visits], n=self._n, params=self._params, greedy=self._greedy
        )
        self._running.update(zip(visits, asked, strict=True))
        self._began.update(dict.fromkeys(visits, self._step))
        assert self._num_outstanding <= bound, (
            f"{self._num_outstanding} visits are outstanding, expected {bound} at most"
        )

    # ---- what has finished

    def _receive(self) -> None:
        done = {visit: ticket.group for visit, ticket in self._running.items() if ticket.group is not None}
        for visit, group in done.items():
            ticket = self._running.pop(visit)
            self._times[visit] = (ticket.written_at, ticket.came_at)
            self._arrived[visit] = group
            if isinstance(group, list):
                self._count("generated", group)
                self._unscored += self._n - len(group)
            else:
                self._unscored += group.unscored

    def _look(self) -> None:
        """Look at what has arrived; with refill, dropped and lost groups are settled and others take their places.

        Only while the driver waits for an iteration: what is settled belongs to a step.
        """
        self._receive()
        while self._arrived:
            for visit, group in sorted(self._arrived.items()):
                if not self._refills or self._sort_out(visit, group):
                    self._finished[visit] = group
            self._arrived.clear()
            if self._refills:
                self._check_share_kept()
                self._admit(self._num_prompts)
                self._receive()

    def _sort_out(self, visit: int, group: Group | LostRollout) -> bool:
        """Settle a lost group, and one that dynamic sampling drops; returns whether the group is kept."""
        if isinstance(group, LostRollout):
            self._seen.lost.append(group)
            self._settle(visit, LOST)
            return False
        self._seen.finished += 1
        if self._keep is None or self._keep.keeps(group):
            return True
        self._seen.filtered += 1
        self._settle(visit, FILTERED)
        return False

    def _check_share_kept(self) -> None:
        """Raises RuntimeError if the iteration has seen as many groups as it may and is not full."""
        keep, seen, num_kept = self._keep, self._seen, len(self._finished)
        assert keep is not None, "only dynamic sampling keeps a share"
        if num_kept == 0 and len(seen.lost) >= self._num_prompts and not seen.finished:
            raise RuntimeError(
                f"all {len(seen.lost)} prompts of an iteration were lost; the first: {seen.lost[0].reason}"
            )
        if num_kept < self._num_prompts and seen.finished + len(seen.lost) >= keep.max_batches * self._num_prompts:
            lost = f"; {len(seen.lost)} more were lost, the first: {seen.lost[0].reason}" if seen.lost else ""
            raise RuntimeError(_too_few(keep, num_kept, self._num_prompts, seen.finished) + lost)

    def _candidates(self) -> list[int]:
        """The finished visits that the next iteration would take, lowest first."""
        return sorted(self._finished)[: self._num_prompts]

    def _is_ready(self) -> bool:
        visits = self._candidates()
        if len(visits) < self._num_prompts:
            return False
        if self._order == PROMPTS and self._running and min(self._running) < visits[-1]:
            return False
        if self._turn_s is None or not self._running or self._waits_since is None:
            return True
        return self._clock() - self._waits_since >= self._turn_s

    def _settle(self, visit: int, outcome: str) -> None:
        self._ledger.settle(visit, outcome)
        self._seen.settled[outcome].append(visit)
        self._began.pop(visit, None)
        self._times.pop(visit, None)

    # ---- metrics

    def _reward_s(self, visits: Sequence[int]) -> float:
        """Seconds of the wait for these visits in which all was generated, and a turn of shared GPUs was over."""
        assert self._waits_since is not None, "an iteration is waited for before it is taken"
        turn_s = self._turn_s if self._turn_s is not None and self._running else 0.0
        times = [self._times.get(visit, (0.0, 0.0)) for visit in visits]
        written, came = (max(column) for column in zip(*times, strict=True))
        return max(0.0, came - max(written, self._waits_since + turn_s))

    def _count(self, what: str, group: Group) -> None:
        self._tokens[what] += sum(sample.num_learnt for sample in group)
        self._tokens[f"{what} completions"] += len(group)

    def _metrics(self, lateness: int) -> dict[str, float]:
        """Of the iteration that is taken: see docs/outputs."""
        seen, tokens, usage = self._seen, self._tokens, self._usage
        assert usage is not None, "an iteration is waited for before it is taken"
        out = {"lost": float(len(seen.lost)), "in_flight": float(len(self._running))}
        out["finished_waiting"] = float(len(self._finished) + len(self._arrived))
        out["iterations_waiting"] = out["finished_waiting"] / self._num_prompts
        out["displacement_max"] = float(max(0, lateness))
        out["oldest_start_lag"] = float(self._step - min(self._began.values(), default=self._step))
        if tokens["generated completions"] and tokens["trained completions"]:
            trained = tokens["trained"] / tokens["trained completions"]
            generated = tokens["generated"] / tokens["generated completions"]
            out["length_trained_over_generated"] = trained / generated if generated else 1.0
        if self._keep is not None:
            out["dropped_share"] = seen.filtered / max(1, seen.finished)
            out["gen_batches"] = seen.finished / self._num_prompts
        out |= usage.of_step(self._writers.counters)
        unscored, self._unscored = self._unscored, 0
        named = {name if name.startswith(OF_AGENTS) else f"rollout/{name}": value for name, value in out.items()}
        return named | {"reward/unscored": float(unscored)}


def _too_few(how: Filter, num_kept: int, wanted: int, num_seen: int) -> str:
    return (
        f"algorithm.filter_groups.max_num_gen_batches={how.max_batches}: {num_kept} of {num_seen} groups had "
        f"completions of different {how.metric}, and an iteration needs {wanted}; expected prompts that are neither "
        "solved nor hopeless, a larger rollout.n, more generation batches, or algorithm.filter_groups.refill=false"
    )
