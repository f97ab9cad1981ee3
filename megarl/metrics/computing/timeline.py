"""`timeline.jsonl` in a run's folder: when each stage of a step began, and how long each rank worked in each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from megarl.metrics.computing.timer import Timer
from megarl.metrics.reading.jsonl import TIMELINE, append_lines

MAX_CALLS = 32  # of a step: the longest
MAX_RANKS = 64  # of a call: the slowest


class TimedCall(NamedTuple):
    """A call to ranks that has ended.  Example: TimedCall("ranks_0", "update actor", 81.2, {0: 0.5, 1: 0.6})"""

    group: str
    name: str
    begin: float  # time.perf_counter() of the driver
    seconds: Mapping[int, float]  # that each rank worked, also one that does not report; with its waits for others


class Timeline:
    """Appends a line for each step; times are seconds since the step began.

    {"step": 7, "stages": [["gen", 0.0, 0.42, 0], ...], "calls": [["ranks_0", "update actor", 0.61, {"0": 0.5}], ...]}
    A stage has its name, begin, seconds and depth: 0, or 1 inside another one.  A call has its group, name, begin, and
    the seconds of its ranks.
    """

    def __init__(self, folder: Path, take_calls: Callable[[], Iterable[TimedCall]]) -> None:
        """`take_calls`: those that ended since it was asked before."""
        self._path, self._take_calls = folder / TIMELINE, take_calls

    def write(self, step: int, timer: Timer) -> dict[str, float]:
        """Write a step's line.

        Returns perf/rank_s/GROUP/mean and /max, the seconds that the ranks of a group worked in all calls of the step,
        and /slowest, the rank that worked longest.
        """
        # Calls before the step began are of an evaluation.
        calls = [call for call in self._take_calls() if call.begin >= timer.began]
        longest = sorted(calls, key=lambda call: -max(call.seconds.values()))[:MAX_CALLS]
        rows = [
            [call.group, call.name, round(call.begin - timer.began, 4), _slowest(call.seconds)]
            for call in sorted(longest, key=lambda call: call.begin)
        ]
        stages = [[name, round(begin, 4), round(seconds, 4), depth] for name, begin, seconds, depth in timer.stages]
        append_lines(self._path, [{"step": step, "stages": stages, "calls": rows}])
        return _worked(calls)


def _worked(calls: Iterable[TimedCall]) -> dict[str, float]:
    groups: dict[str, dict[int, float]] = {}
    for call in calls:
        ranks = groups.setdefault(call.group, {})
        for rank, seconds in call.seconds.items():
            ranks[rank] = ranks.get(rank, 0.0) + seconds
    out: dict[str, float] = {}
    for group, ranks in groups.items():
        slowest = max(ranks, key=ranks.__getitem__)
        numbers = {"mean": sum(ranks.values()) / len(ranks), "max": ranks[slowest], "slowest": float(slowest)}
        out |= {f"perf/rank_s/{group}/{name}": number for name, number in numbers.items()}
    return out


def _slowest(seconds: Mapping[int, float]) -> dict[str, float]:
    chosen = sorted(seconds, key=lambda rank: -seconds[rank])[:MAX_RANKS]
    return {str(rank): round(seconds[rank], 4) for rank in sorted(chosen)}
