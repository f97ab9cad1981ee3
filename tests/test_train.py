"""The loops of `megarl train` and `megarl sft`, with nothing behind them, on a clock of the test's own."""

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest

from megarl import train as train_module
from megarl.metrics.computing.timer import Timer
from megarl.trainer import stage as stage_module
from megarl.trainer.evaluation.evaluate import Evaluation


@pytest.mark.parametrize("command", ["train", "sft"])
def test_the_startup_is_no_part_of_the_first_step(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now, seconds = [0.0], list[float]()
    timer = Timer(clock=lambda: now[0])

    def wait(wait_s: float, *_: Any) -> None:
        now[0] += wait_s

    def step(*_: Any) -> None:
        wait(2.0)
        seconds.append(timer.finish(num_tokens=1)["timing_s/step"])

    run = MagicMock(timer=timer, began=0.0)
    run.log.timer, run.plan.first_step, run.plan.num_steps, run.signals.ends = timer, 0, 2, False
    run.plan.config.trainer.test_freq = -1
    run.push.side_effect = run._evaluate.side_effect = partial(wait, 600.0)
    if command == "train":
        monkeypatch.setattr(train_module, "train_step", step)
        monkeypatch.setattr(train_module, "lost_at_an_end", lambda *_: "")
        monkeypatch.setattr(train_module, "profiled", lambda *_: nullcontext())
        monkeypatch.setattr(train_module, "evaluate_if_due", lambda *_: Evaluation([]))
        monkeypatch.setattr(train_module, "finish", MagicMock())
        train_module.train_loop(run)
    else:
        run._step.side_effect = step
        monkeypatch.setattr(stage_module, "kept", MagicMock())
        stage_module.StageRun.train(run)
    assert seconds == [2.0, 2.0]
