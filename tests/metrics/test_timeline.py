"""timeline.jsonl: stages and calls of a step, in seconds since it began."""

from __future__ import annotations

from pathlib import Path

from megarl.metrics import timeline
from megarl.metrics.jsonl import read_lines
from megarl.metrics.timeline import TIMELINE, Call, Timeline
from megarl.metrics.timer import Timer


def test_stages_and_calls_of_a_step_begin_with_it(tmp_path: Path) -> None:
    seconds = iter([100.0, 101.0, 101.5, 103.5, 104.0])
    timer = Timer(clock=lambda: next(seconds))
    with timer("update"), timer("inside"):
        pass
    calls = [Call("ranks_0", "watch", 99.0, {0: 9.0}), Call("ranks_0", "update actor", 101.25, {0: 0.5, 1: 0.75})]
    metrics = Timeline(tmp_path, lambda: calls).write(7, timer)
    slowest = {"mean": 0.625, "max": 0.75, "slowest": 1.0}
    assert metrics == {f"perf/rank_s/ranks_0/{name}": number for name, number in slowest.items()}
    (row,) = read_lines(tmp_path / TIMELINE)
    assert row == {
        "step": 7,
        "stages": [["inside", 1.5, 2.0, 1], ["update", 1.0, 3.0, 0]],
        "calls": [["ranks_0", "update actor", 1.25, {"0": 0.5, "1": 0.75}]],  # the other was before the step
    }


def test_only_the_longest_calls_and_the_slowest_ranks_are_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(timeline, "MAX_CALLS", 2)
    monkeypatch.setattr(timeline, "MAX_RANKS", 1)
    calls = [Call("g", name, at, {0: s, 1: s / 2}) for at, (name, s) in enumerate([("b", 3.0), ("a", 1.0), ("c", 2.0)])]
    Timeline(tmp_path, lambda: calls).write(1, Timer(clock=lambda: 0.0))
    (row,) = read_lines(tmp_path / TIMELINE)
    assert row["calls"] == [["g", "b", 0.0, {"0": 3.0}], ["g", "c", 2.0, {"0": 2.0}]]
