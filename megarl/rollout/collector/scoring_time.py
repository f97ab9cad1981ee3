"""How long a group waited for its rewards, after all of it was generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from megarl.rollout.collect import Score, Scored
from megarl.sample import Completion, Prompt


@dataclass
class ScoringTime:
    """Of one group.  Its episodes may be scored one by one: while the last of them is not written, no reward is alone.

    Example:
        score = timed(scorer.score)
        spent = ScoringTime()
        SPENT.set(spent)
        await writer.group(...)          # calls `score` in this task, or in tasks that it starts
        spent.seconds                    # between the last begin and the last end of a call
    """

    began: float = 0.0  # the last call of the reward
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.began)


SPENT: ContextVar[ScoringTime] = ContextVar("SPENT")  # of the group that the running task makes


def timed(score: Score, clock: Callable[[], float] = time.monotonic) -> Score:
    """The same reward, which notes in SPENT when it was called."""

    async def scored(prompt: Prompt, completions: list[Completion]) -> Sequence[Scored | str]:
        spent = SPENT.get()
        spent.began = clock()
        try:
            return await score(prompt, completions)
        finally:
            spent.ended = clock()

    return scored
