"""The groups of one iteration after another, with as many iterations under way as the run allows.

`ahead=0` asks for an iteration's completions only when the driver wants them: on-policy.  With `ahead=k`, up to k
further iterations are being written while the driver trains; a sample is then at most k pushes old when it began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megarl.rollout.protocol import MAX_SEED, SamplingParams
from megarl.rollout.stream import Stream
from megarl.sample import LostRollout, Prompt, Sample


class PromptSource(Protocol):
    def take(self, count: int) -> list[Prompt]: ...

    def state_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Iteration:
    """What was written for one step."""

    groups: list[list[Sample]]
    lost: list[LostRollout]
    position: dict[str, Any]  # of the prompts, behind this iteration: what a checkpoint saves


class Feed:
    """Asks for iterations first_step .. num_steps - 1, each of `num_prompts` prompts with n completions."""

    def __init__(
        self,
        stream: Stream,
        prompts: PromptSource,
        *,
        num_prompts: int,
        n: int,
        params: SamplingParams,
        ahead: int,
        first_step: int,
        num_steps: int,
    ) -> None:
        self._stream, self._prompts = stream, prompts
        self._num_prompts, self._n, self._params = num_prompts, n, params
        self._ahead, self._next_step, self._num_steps = ahead, first_step, num_steps
        self._under_way: deque[tuple[int, dict[str, Any]]] = deque()  # ticket, position behind it

    def next(
        self,
        on_progress: Callable[[int, int], None] | None = None,
        timeout_s: float = 3600.0,
        watch: Callable[[], None] | None = None,
    ) -> Iteration:
        """The next iteration (see Stream.next); raises a RuntimeError when every group of it was lost."""
        while len(self._under_way) <= self._ahead and self._next_step < self._num_steps:
            self._submit()
        ticket, position = self._under_way.popleft()
        found: Sequence[list[Sample] | LostRollout] = self._stream.next(ticket, on_progress, timeout_s, watch)
        groups = [group for group in found if not isinstance(group, LostRollout)]
        lost = [group for group in found if isinstance(group, LostRollout)]
        if not groups:
            raise RuntimeError(f"all {len(lost)} prompts of an iteration were lost; the first: {lost[0].reason}")
        return Iteration(groups, lost, position)

    def _submit(self) -> None:
        step, self._next_step = self._next_step, self._next_step + 1
        prompts = self._prompts.take(self._num_prompts)
        seed = self._params.sampling_seed
        # A seed of its own for each step: a resumed run draws what the run that died would have drawn.
        params = (
            self._params if seed is None else replace(self._params, sampling_seed=(seed * 1_000_003 + step) & MAX_SEED)
        )
        ticket = self._stream.submit(prompts, n=self._n, params=params)
        self._under_way.append((ticket, self._prompts.state_dict()))
