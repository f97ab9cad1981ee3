"""Prefetch: requests the completions of coming iterations while the driver trains, as many as staleness allows.

At most (ahead + 1) B visits of prompts are outstanding, B an iteration's prompts.  New ones are admitted only when the
driver begins to wait for an iteration, that is after a push.  `ahead=0` is on-policy.  A group is never dropped for its
age: what is too old is decided token by token, by `rollout.max_age`.

`order=finished` takes, of the finished groups, those of the lowest visits: a long answer is trained when it is done.
`order=prompts` takes the visits strictly in order, so an iteration waits for its slowest answer.

Dynamic sampling (`Filter`) drops groups whose rewards are all equal.  With refill, other visits take their places until
the iteration is full.  The ledger settles every visit once: trained, filtered, lost or skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from megarl.data.ledger import FILTERED, LOST, OUTCOMES, SKIPPED, TRAINED, Ledger
from megarl.data.prompts import Prompts
from megarl.rollout.collector.collector_client import Collectors, Ticket
from megarl.rollout.group_filter import Filter
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.usage import Lengths, Usage
from megarl.samples.sample import OF_AGENTS, LostRollout, Sample

PROMPTS, FINISHED = "prompts", "finished"

Group = list[Sample]


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


class State(Enum):
    """The state of an outstanding visit; the ledger can settle it in any state but the first."""

    RUNNING = auto()  # its group is being generated
    ARRIVED = auto()  # its group is there and not yet looked at
    READY = auto()  # an iteration may take it


@dataclass(eq=False)
class Visit:
    """A visit that is admitted and not settled."""

    state: State
    began: int | None = None  # the step at which it was admitted; None: in the run that this one continues
    ticket: Ticket | None = None
    group: Group | LostRollout | None = None

    @property
    def times(self) -> tuple[float, float]:
        """When all was generated, and when the group came; zeros if that is not known."""
        return (self.ticket.generated_at, self.ticket.came_at) if self.ticket else (0.0, 0.0)


@dataclass(frozen=True)
class PrefetchSettings:
    """What iterations are made of, and how far ahead of the training step their visits are admitted."""

    num_prompts: int  # visits of an iteration
    n: int  # completions of a visit
    params: SamplingParams
    ahead: int
    order: str  # PROMPTS or FINISHED
    num_steps: int  # iterations of the whole run
    greedy: bool = False  # also a greedy completion of each prompt
    keep: Filter | None = None  # dynamic sampling; None keeps every group
    # With GPUs that servers and trainer share, an iteration is not ready before the servers generated for so long,
    # unless nothing is left to do.
    turn_s: float | None = None

    def __post_init__(self) -> None:
        assert self.order in (PROMPTS, FINISHED), f"order {self.order}: expected {PROMPTS} or {FINISHED}"


class Prefetcher:
    """Requests what iterations first_step .. num_steps - 1 need, each `num_prompts` visits with n completions.

    Example:

        while not prefetcher.ready():
            ...                               # check the servers
        batch = prefetcher.take()

    `waiting`: finished groups of a run that this one continues, by visit; `clock` in seconds.
    """

    def __init__(
        self,
        collectors: Collectors,
        ledger: Ledger,
        prompts: Prompts,
        settings: PrefetchSettings,
        *,
        first_step: int = 0,
        waiting: Mapping[int, Group] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collectors = collectors
        self._ledger = ledger
        self._prompts = prompts
        self._settings = settings
        self._num_prompts = settings.num_prompts
        self._keep = settings.keep
        self._turn_s = settings.turn_s
        self._step, self._clock = first_step, clock
        self._visits: dict[int, Visit] = {}  # that are outstanding
        self._waits_since: float | None = None  # for the next iteration
        self._seen = _Seen()
        self._usage: Usage | None = None  # since the first iteration was waited for
        self._lengths = Lengths()
        self._unscored = 0  # completions that came since the last iteration was taken
        for visit, group in (waiting or {}).items():
            self._visits[visit] = Visit(State.ARRIVED, group=group)
            self._lengths.add("generated", group)

    # ---- what the driver calls

    def ready(self, timeout_s: float = 1.0) -> bool:
        """Whether the next iteration is complete; waits up to `timeout_s` for something to finish.

        The first call of an iteration admits new visits.  Raises RuntimeError if all groups of an iteration were lost,
        or if dynamic sampling keeps too few groups.
        """
        if self._waits_since is None:
            self._waits_since = self._clock()
            self._usage = self._usage or Usage(self._collectors.counters)
            self._collectors.wait(0.0)  # what came while the driver trained makes room, or is the oldest
            self._look()
            self._admit((self._settings.ahead + 1) * self._num_prompts)
        if not self._is_ready():
            self._collectors.wait(timeout_s)
            self._look()
        return self._is_ready()

    def take(self) -> RolloutBatch:
        """The next iteration, once it is ready.  With dynamic sampling without refill it may have no group."""
        assert self._is_ready(), "an iteration is taken when it is ready"
        visits = self._candidates()
        reward_s = self._reward_s(visits)
        num_settled = self._ledger.num_settled
        groups: list[Group] = []
        for visit in visits:
            group = self._visits[visit].group
            if (self._refills or self._is_kept(visit)) and isinstance(group, list):
                groups.append(group)
                self._settle(visit, TRAINED)
                self._lengths.add("trained", group)
        lost = self._seen.lost
        if not groups and len(lost) == len(visits):
            raise RuntimeError(f"all {len(lost)} prompts of an iteration were lost; the first: {lost[0].reason}")
        metrics = self._metrics(lateness=num_settled - min(visits))
        outcomes = {outcome: sorted(of_it) for outcome, of_it in self._seen.settled.items()}  # they came in any order
        self._step = self._step + 1
        self._waits_since = None
        self._seen = _Seen()
        return RolloutBatch(groups, lost, outcomes, metrics, reward_s)

    def skip(self, batch: RolloutBatch, visits: Collection[int]) -> None:
        """Count visits of an iteration as skipped, and no longer as trained."""
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
        return not self._in(State.RUNNING)

    def wait(self, timeout_s: float = 1.0) -> None:
        """Wait for something to finish, without admitting anything."""
        self._collectors.wait(timeout_s)

    @property
    def waiting(self) -> dict[int, Group]:
        """Finished groups that no iteration has taken yet, by visit: a checkpoint saves them."""
        self._collectors.wait(0.0)
        self._receive()
        groups = {number: visit.group for number, visit in sorted(self._visits.items())}
        return {number: group for number, group in groups.items() if isinstance(group, list)}

    # ---- admission

    @property
    def _refills(self) -> bool:
        return self._keep is not None and self._keep.refill

    def _in(self, state: State) -> list[int]:
        """The visits in this state, lowest first."""
        return sorted(number for number, visit in self._visits.items() if visit.state is state)

    def _admit(self, most: int) -> None:
        """Admit visits until `most` are outstanding, but no more than the iterations that are left can take.

        In the order of the prompts everything that a resumed run left open is admitted at once, even if this run has a
        smaller lead: finished groups of later visits would overtake what is left out.
        """
        num_open, settings = len(self._visits), self._settings
        most = min(most, (settings.num_steps - self._step) * self._num_prompts)
        again = self._ledger.num_again if settings.order == PROMPTS else 0
        bound = max((settings.ahead + 1) * self._num_prompts, num_open + again)
        visits = self._ledger.issue(max(again, most - num_open))
        self._seen.settled[SKIPPED] += self._ledger.passed()
        if not visits:
            return
        prompts = [self._prompts.visit(visit) for visit in visits]
        tickets = self._collectors.submit(prompts, n=settings.n, params=settings.params, greedy=settings.greedy)
        for number, ticket in zip(visits, tickets, strict=True):
            self._visits[number] = Visit(State.RUNNING, self._step, ticket)
        assert len(self._visits) <= bound, f"{len(self._visits)} visits are outstanding, expected {bound} at most"

    # ---- what has finished

    def _receive(self) -> None:
        for visit in self._visits.values():
            if visit.state is not State.RUNNING or visit.ticket is None or visit.ticket.group is None:
                continue
            visit.state, visit.group = State.ARRIVED, visit.ticket.group
            if isinstance(visit.group, list):
                self._lengths.add("generated", visit.group)
                self._unscored += self._settings.n - len(visit.group)
            else:
                self._unscored += visit.group.unscored

    def _look(self) -> None:
        """Look at what has arrived; with refill, dropped and lost groups are settled and others take their places.

        Only while the driver waits for an iteration: what is settled belongs to a step.
        """
        self._receive()
        while arrived := self._in(State.ARRIVED):
            for visit in arrived:
                if not self._refills or self._is_kept(visit):
                    self._visits[visit].state = State.READY
            if self._refills:
                self._check_share_kept()
                self._admit(self._num_prompts)
                self._receive()

    def _is_kept(self, visit: int) -> bool:
        """Whether a group is to be trained; settles a lost one, and one that dynamic sampling drops."""
        group = self._visits[visit].group
        assert group is not None, "only what has arrived is looked at"
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
        keep = self._keep
        seen = self._seen
        num_kept = len(self._in(State.READY))
        assert keep is not None, "only dynamic sampling keeps a share"
        if num_kept == 0 and len(seen.lost) >= self._num_prompts and not seen.finished:
            raise RuntimeError(
                f"all {len(seen.lost)} prompts of an iteration were lost; the first: {seen.lost[0].reason}"
            )
        if num_kept < self._num_prompts and seen.finished + len(seen.lost) >= keep.max_batches * self._num_prompts:
            lost = f"; {len(seen.lost)} more were lost, the first: {seen.lost[0].reason}" if seen.lost else ""
            raise RuntimeError(keep.too_few(num_kept, self._num_prompts, seen.finished) + lost)

    def _candidates(self) -> list[int]:
        """The visits that the next iteration would take, lowest first."""
        return self._in(State.READY)[: self._num_prompts]

    def _is_ready(self) -> bool:
        visits, running = self._candidates(), self._in(State.RUNNING)
        if len(visits) < self._num_prompts:
            return False
        if self._settings.order == PROMPTS and running and running[0] < visits[-1]:
            return False
        if self._turn_s is None or not running or self._waits_since is None:
            return True
        return self._clock() - self._waits_since >= self._turn_s

    def _settle(self, visit: int, outcome: str) -> None:
        self._ledger.settle(visit, outcome)
        self._seen.settled[outcome].append(visit)
        del self._visits[visit]

    # ---- metrics

    def _reward_s(self, visits: Sequence[int]) -> float:
        """Seconds of the wait for these visits in which all was generated, and a turn of shared GPUs was over."""
        assert self._waits_since is not None, "an iteration is waited for before it is taken"
        turn_s = self._turn_s if self._turn_s is not None and self._in(State.RUNNING) else 0.0
        generated, came = (max(column) for column in zip(*(self._visits[visit].times for visit in visits), strict=True))
        return max(0.0, came - max(generated, self._waits_since + turn_s))

    def _metrics(self, lateness: int) -> dict[str, float]:
        """Metrics of the iteration that is taken; docs/outputs.md lists them."""
        seen = self._seen
        usage = self._usage
        num_running = len(self._in(State.RUNNING))
        assert usage is not None, "an iteration is waited for before it is taken"
        began = [visit.began for visit in self._visits.values() if visit.began is not None]
        lost = sum(not group.unscored for group in seen.lost)  # by servers; reward/unscored has the others
        out = {"lost": float(lost), "in_flight": float(num_running)}
        out["finished_waiting"] = float(len(self._visits) - num_running)
        out["iterations_waiting"] = out["finished_waiting"] / self._num_prompts
        out["displacement_max"] = float(max(0, lateness))
        out["oldest_start_lag"] = float(self._step - min(began, default=self._step))
        if self._keep is not None:
            out["dropped_share"] = seen.filtered / max(1, seen.finished)
            out["gen_batches"] = seen.finished / self._num_prompts
        out |= self._lengths.metrics() | usage.of_step(self._collectors.counters)
        unscored, self._unscored = self._unscored, 0
        named = {name if name.startswith(OF_AGENTS) else f"rollout/{name}": value for name, value in out.items()}
        return named | {"reward/unscored": float(unscored)}
