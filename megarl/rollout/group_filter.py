"""Dynamic sampling: drops the groups that teach nothing, because all their scores are equal (arXiv:2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.samples.sample import REWARD_ERROR, Sample, own_name


@dataclass(frozen=True)
class Filter:
    """Which groups dynamic sampling keeps, and whether it replaces the others.  Example: Filter(refill=False)."""

    metric: str = "score"  # the reward, or one of its extra numbers
    refill: bool = True  # visit other prompts for dropped groups
    max_batches: int = 10  # an iteration sees at most so many times its number of prompts

    def keeps(self, group: Sequence[Sample]) -> bool:
        """Whether the metric differs between the group's completions, as float32: so a batch has it."""
        return len({float(np.float32(self._value(sample, at))) for at, sample in enumerate(group)}) > 1

    def too_few(self, num_kept: int, wanted: int, num_seen: int) -> str:
        """The sentence for an iteration that is not full after `num_seen` groups."""
        return (
            f"algorithm.filter_groups.max_num_gen_batches={self.max_batches}: {num_kept} of {num_seen} groups had "
            f"completions of different {self.metric}, and an iteration needs {wanted}; expected prompts that are "
            "neither solved nor hopeless, a larger rollout.n, more generation batches, or "
            "algorithm.filter_groups.refill=false"
        )

    def _value(self, sample: Sample, at: int) -> float:
        if self.metric == "score" or REWARD_ERROR in sample.reward_extra:  # after a reward error it is 0
            return sample.reward
        name = own_name(self.metric)
        if name not in sample.reward_extra:
            has = ", ".join(sample.reward_extra) or "none"
            raise ValueError(
                f"algorithm.filter_groups.metric={self.metric}: the reward of sample {sample.prompt.uid}#{at} has no "
                f"number of that name; expected score or one that reward.fn returns for every sample (here: {has})"
            )
        return sample.reward_extra[name]
