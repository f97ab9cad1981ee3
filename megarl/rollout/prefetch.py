"""Prefetch: requests the completions of the next iterations while the driver trains, as far as staleness allows.

`ahead=0` requests an iteration's completions only when the driver waits for them: on-policy.  With `ahead=k`, up to k
further iterations are generated while the driver trains; the staleness of a sample's first token is at most k pushes.

Dynamic sampling drops groups whose rewards are all equal and, with refill, requests more prompts until the iteration
is full.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megarl.algo.reward_shaping import is_informative
from megarl.rollout.collector_client import CollectorClient
from megarl.rollout.protocol import MAX_SEED, SamplingParams
from megarl.sample import REWARD_ERROR, LostRollout, Prompt, Sample

FEWEST_KEPT = 0.1  # lower bound of the expected share of kept groups, for the size of a refill


class PromptSource(Protocol):
    def take(self, count: int) -> list[Prompt]: ...

    def state_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Filter:
    """Which groups dynamic sampling keeps, and whether it replaces the others.  Example: Filter(refill=False)."""

    metric: str = "score"  # the reward, or one of its extra numbers
    refill: bool = True  # request other prompts for dropped groups
    max_batches: int = 10  # generation batches of one iteration, the first included

    def keeps(self, group: Sequence[Sample]) -> bool:
        """Whether the metric differs between the group's completions."""
        return is_informative([self._value(sample, at) for at, sample in enumerate(group)])

    def _value(self, sample: Sample, at: int) -> float:
        if self.metric == "score" or REWARD_ERROR in sample.reward_extra:  # after a reward error it is 0
            return sample.reward
        if self.metric not in sample.reward_extra:
            has = ", ".join(sample.reward_extra) or "none"
            raise ValueError(
                f"algorithm.filter_groups.metric={self.metric}: the reward of sample {sample.prompt.uid}#{at} has no "
                f"number of that name; expected score or one that reward.fn returns for every sample (here: {has})"
            )
        return sample.reward_extra[self.metric]


@dataclass(frozen=True)
class RolloutBatch:
    """The rollout of one training step."""

    groups: list[list[Sample]]
    lost: list[LostRollout]
    position: dict[str, Any]  # in the prompts, after this iteration: what a checkpoint saves
    counts: dict[str, float] = field(default_factory=dict)  # metrics of dynamic sampling

    @property
    def metrics(self) -> dict[str, float]:
        """rollout/lost, and rollout/{dropped_share,gen_batches} with dynamic sampling."""
        return {"rollout/lost": float(len(self.lost))} | {f"rollout/{name}": n for name, n in self.counts.items()}


@dataclass
class _Iteration:
    """A requested iteration, and its groups so far."""

    ticket: int  # of its latest generation batch
    before: dict[str, Any]  # position of its first prompt
    params: SamplingParams  # of all its generation batches
    kept: list[list[Sample]] = field(default_factory=list)
    lost: list[LostRollout] = field(default_factory=list)
    num_seen: int = 0  # groups that were not lost
    num_batches: int = 0  # generation batches that are here
    is_complete: bool = False


class Prefetcher:
    """Requests iterations first_step .. num_steps - 1, each of `num_prompts` prompts with n completions.

    Example:

        while not prefetcher.ready():
            ...                               # check the servers
        batch = prefetcher.take()

    `greedy`: also a greedy completion of each prompt.  `keep`: dynamic sampling; None keeps every group.
    """

    def __init__(
        self,
        collector: CollectorClient,
        prompts: PromptSource,
        *,
        num_prompts: int,
        n: int,
        params: SamplingParams,
        ahead: int,
        first_step: int,
        num_steps: int,
        greedy: bool = False,
        keep: Filter | None = None,
    ) -> None:
        self._collector, self._prompts = collector, prompts
        self._num_prompts, self._n, self._params, self._greedy, self._keep = num_prompts, n, params, greedy, keep
        self._ahead, self._next_step, self._num_steps = ahead, first_step, num_steps
        self._under_way: deque[_Iteration] = deque()

    def ready(self, timeout_s: float = 1.0) -> bool:
        """Whether the next iteration is complete; waits up to `timeout_s`, as CollectorClient.ready does.

        It also requests further iterations up to `ahead`, and another generation batch if dynamic sampling kept too
        few groups.  Raises RuntimeError if every group of a generation batch was lost, or if dynamic sampling with
        refill keeps too few groups within the allowed generation batches.
        """
        while len(self._under_way) <= self._ahead and self._next_step < self._num_steps:
            self._submit()
        iteration = self._under_way[0]
        if not iteration.is_complete and self._collector.ready(iteration.ticket, timeout_s):
            self._add(iteration, self._collector.take(iteration.ticket))
        return iteration.is_complete

    @property
    def progress(self) -> tuple[int, int]:
        """(finished groups, all groups) of the generation batch that the next iteration waits for."""
        return self._collector.progress(self._under_way[0].ticket)

    def take(self) -> RolloutBatch:
        """The next iteration, once it is ready.  With dynamic sampling without refill it may have no group."""
        iteration = self._under_way.popleft()
        assert iteration.is_complete, "an iteration is taken when it is ready"
        kept, lost = iteration.kept, iteration.lost
        if self._keep is None:
            return RolloutBatch(kept, lost, self._position())
        dropped = 1 - len(kept) / iteration.num_seen
        counts = {"dropped_share": dropped, "gen_batches": float(iteration.num_batches)}
        return RolloutBatch(kept[: self._num_prompts], lost, self._position(), counts)

    def _add(self, iteration: _Iteration, found: Sequence[list[Sample] | LostRollout]) -> None:
        """Add a generation batch; if the iteration is not complete with it, request another one."""
        groups = [group for group in found if not isinstance(group, LostRollout)]
        lost = [group for group in found if isinstance(group, LostRollout)]
        if not groups:
            raise RuntimeError(f"all {len(lost)} prompts of an iteration were lost; the first: {lost[0].reason}")
        keep = self._keep
        iteration.kept += groups if keep is None else [group for group in groups if keep.keeps(group)]
        iteration.lost += lost
        iteration.num_seen += len(groups)
        iteration.num_batches += 1
        num_kept = len(iteration.kept)
        if keep is None or not keep.refill or num_kept >= self._num_prompts:
            iteration.is_complete = True
        elif iteration.num_batches == keep.max_batches:
            raise RuntimeError(_too_few(keep, num_kept, self._num_prompts, iteration.num_seen))
        else:
            count = self._guess(self._num_prompts - num_kept, num_kept / iteration.num_seen)
            iteration.ticket = self._ask(count, iteration.params)

    def _guess(self, missing: int, share_kept: float) -> int:
        """How many prompts will probably fill the gap; at most a whole batch."""
        return min(self._num_prompts, math.ceil(missing / max(share_kept, FEWEST_KEPT)))

    def _position(self) -> dict[str, Any]:
        """Where a resumed run continues in the prompts: at the first of the iterations that are in flight.

        Refills took prompts after those of the iterations in flight; a resumed run may use them again, and skips none.
        """
        return self._under_way[0].before if self._under_way else self._prompts.state_dict()

    def _submit(self) -> None:
        step, self._next_step = self._next_step, self._next_step + 1
        before, seed = self._prompts.state_dict(), self._params.sampling_seed
        # A separate seed for each step: a resumed run samples what the run that died would have sampled.
        params = (
            self._params if seed is None else replace(self._params, sampling_seed=(seed * 1_000_003 + step) & MAX_SEED)
        )
        self._under_way.append(_Iteration(self._ask(self._num_prompts, params), before, params))

    def _ask(self, count: int, params: SamplingParams) -> int:
        return self._collector.submit(self._prompts.take(count), n=self._n, params=params, greedy=self._greedy)


def _too_few(how: Filter, num_kept: int, wanted: int, num_seen: int) -> str:
    return (
        f"algorithm.filter_groups.max_num_gen_batches={how.max_batches}: {num_kept} of {num_seen} groups had "
        f"completions of different {how.metric}, and an iteration needs {wanted}; expected prompts that are neither "
        "solved nor hopeless, a larger rollout.n, more generation batches, or algorithm.filter_groups.refill=false"
    )
