"""When a run saves: by steps, by time, at its end, and when a signal asks."""

from __future__ import annotations

import time
from collections.abc import Callable

from megarl.config.schema import Trainer
from megarl.processes.signals import Signals
from megarl.trainer.checkpoint.checkpoint import Checkpoint


class SaveTimes:
    """Example: if times.due(step): saver.start(step), then saver.describe(state)."""

    def __init__(
        self,
        settings: Trainer,
        signals: Signals,
        *,
        first_step: int,
        num_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first_step`: the run begins with the state after so many steps, which is saved or needs no save.

        `clock`: in seconds.
        """
        self.last = first_step  # of the last save
        self._freq, self._every_s, self._saves = settings.save_freq, settings.save_every_s, settings.saves
        self._signals, self._num_steps, self._clock = signals, num_steps, clock
        self._since = clock()

    def due(self, step: int) -> bool:
        """Whether the state after `step` steps is to be saved; if so, it counts as saved."""
        by_steps = self._freq > 0 and step % self._freq == 0
        by_time = self._every_s is not None and self._clock() - self._since >= self._every_s
        at_end = step == self._num_steps and self._saves
        asked = self._signals.take_save() or self._signals.ends
        if not (by_steps or by_time or at_end or asked):
            return False
        self.last, self._since = step, self._clock()
        return True


def saved(step: int, last: Checkpoint | None) -> str:
    """What a run that ends after `step` says; `last`: its newest save, which is older if the last one has failed."""
    if last is None:
        return f"step {step} is finished, and nothing is saved"
    return f"step {step} is finished, step {last.step} is saved; the same command goes on from there"
