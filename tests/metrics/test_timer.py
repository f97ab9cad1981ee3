"""Seconds of a step's stages, its timeline, and how long a run still takes; all on clocks of the test's own."""

from pathlib import Path

import pytest

from megarl.metrics.computing import timeline
from megarl.metrics.computing.timeline import TimedCall, Timeline
from megarl.metrics.computing.timer import Timer
from megarl.metrics.reading.jsonl import TIMELINE, read_lines
from megarl.metrics.reading.pace import Pace, clock_text, is_step


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_stages_add_up_nest_and_leave_a_rest():
    clock, seen = Clock(), []
    timer = Timer(on_stage=seen.append, clock=clock)
    clock.wait(50)  # before the first step
    timer.start()
    with timer("gen"):
        clock.wait(2)
        with timer("reward"):
            clock.wait(1)
    with timer("update_actor"):
        clock.wait(4)
    with timer("gen"):
        clock.wait(1)
    clock.wait(2)
    assert timer.finish(num_tokens=400, num_devices=2) == pytest.approx(
        {
            "timing_s/gen": 4,
            "timing_s/reward": 1,
            "timing_s/update_actor": 4,
            "timing_s/step": 10,
            "perf/total_num_tokens": 400,
            "perf/time_per_step": 10,
            "perf/throughput": 20,
            "perf/throughput_total": 40,
            "perf/unaccounted": 0.2,
        }
    )
    assert seen == ["gen", "reward", "update_actor", "gen"]
    clock.wait(1)
    found = timer.finish(num_tokens=0)
    assert (found["timing_s/step"], found["perf/throughput"], found["perf/unaccounted"]) == (1, 0, 1)


def test_the_end_of_a_stage_may_belong_to_another_one():
    clock = Clock()
    timer = Timer(clock=clock)
    for seconds in (1, 2):
        with timer("gen"):
            clock.wait(4)
        assert timer.split("gen", "reward", seconds) == seconds
    with timer("gen"):
        clock.wait(1)
    assert timer.split("gen", "reward", 9) == 1, "it had no more"
    assert [stage[:3] for stage in timer.stages[:2]] == [("gen", 0, 3), ("reward", 3, 1)]
    found = timer.finish(num_tokens=1)
    assert (found["timing_s/gen"], found["timing_s/reward"], found["perf/unaccounted"]) == (5, 4, 0)


def test_a_stage_that_raises_is_timed_and_closed_and_a_step_ends_outside_of_stages():
    clock = Clock()
    timer = Timer(clock=clock)
    with pytest.raises(KeyError), timer("gen"):
        clock.wait(3)
        raise KeyError
    assert timer.finish(num_tokens=1)["timing_s/gen"] == 3
    with pytest.raises(AssertionError), timer("gen"):
        timer.finish(num_tokens=1)


def test_stages_and_calls_of_a_step_begin_with_it(tmp_path: Path) -> None:
    seconds = iter([100.0, 101.0, 101.5, 103.5, 104.0])
    timer = Timer(clock=lambda: next(seconds))
    with timer("update"), timer("inside"):
        pass
    calls = [
        TimedCall("ranks_0", "watch", 99.0, {0: 9.0}),
        TimedCall("ranks_0", "update actor", 101.25, {0: 0.5, 1: 0.75}),
    ]
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
    calls = [
        TimedCall("g", name, at, {0: s, 1: s / 2}) for at, (name, s) in enumerate([("b", 3.0), ("a", 1.0), ("c", 2.0)])
    ]
    Timeline(tmp_path, lambda: calls).write(1, Timer(clock=lambda: 0.0))
    (row,) = read_lines(tmp_path / TIMELINE)
    assert row["calls"] == [["g", "b", 0.0, {"0": 3.0}], ["g", "c", 2.0, {"0": 2.0}]]


@pytest.mark.parametrize(
    ("ends", "step_s", "total", "left"),
    [
        ([], 0.0, 100, None),
        ([(1, 612.0)], 2.0, 100, 99 * 2.0),  # its own seconds: nothing else is known yet
        ([(1, 610.0), (2, 650.0), (3, 690.0), (5, 770.0)], 10.0, 80, 75 * 40.0),  # what is between steps counts
        ([(1, 610.0), (2, 650.0), (3, 690.0), (5, 770.0)], 10.0, 4, 0.0),
        ([(1, 10.0), (2, 20.0), (3, 30.0), (2, 500.0), (3, 504.0)], 4.0, 10, 7 * 4.0),  # steps that are made again
    ],
)
def test_the_pace_is_from_end_to_end(
    ends: list[tuple[int, float]], step_s: float, total: int, left: float | None
) -> None:
    pace = Pace()
    for step, end in ends:
        pace.note(step, end, step_s)
    assert pace.seconds_left(total) == left


def test_metrics_of_an_evaluation_are_none_of_a_step_and_seconds_are_shown_as_a_clock_does():
    assert is_step({"timing_s/step": 1.0, "val/score": 0.5})
    assert not is_step({"val/score": 0.5, "timing_s/testing": 3.0, "audit/gap": 0.1})
    assert [clock_text(seconds) for seconds in (None, 0.2, 75, 3725)] == ["?", "0:00", "1:15", "1:02:05"]
