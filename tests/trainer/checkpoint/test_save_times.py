"""When a save is due."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

from megarl.processes.signals import Signals
from megarl.trainer.checkpoint.save_times import SaveTimes


def times(signals: Signals, clock: list[float], **settings: Any) -> SaveTimes:
    found: Any = SimpleNamespace(**{"save_freq": -1, "save_every_s": None, "saves": bool(settings)} | settings)
    return SaveTimes(found, signals, first_step=0, num_steps=10, clock=lambda: clock[0])


def test_saves_are_due_by_steps_by_time_and_at_the_end() -> None:
    nothing, clock = Signals(1.0), [100.0]
    by_steps = times(nothing, clock, save_freq=4)
    assert [step for step in range(1, 11) if by_steps.due(step)] == [4, 8, 10]
    by_time = times(nothing, clock, save_every_s=30.0)
    due = []
    for step in range(1, 11):
        clock[0] += 20.0
        if by_time.due(step):
            due.append(step)
    assert due == [2, 4, 6, 8, 10], "30 s are over after two steps of 20 s"
    never = times(nothing, clock)
    assert not any(never.due(step) for step in range(1, 11))
    assert never.last == 0


def test_a_signal_makes_one_save_due_even_where_it_was_due_anyway() -> None:
    with Signals(60.0) as signals:
        saves = times(signals, [0.0], save_freq=2)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [step for step in range(1, 6) if saves.due(step)] == [1, 2, 4]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [step for step in range(6, 10) if saves.due(step)] == [6, 8]
        assert saves.last == 8
