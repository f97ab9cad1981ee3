"""What stage timers, status, timeline and metrics of a step cost the driver: CPU seconds, and their share of a step.

    python benchmarks/quickstart/bench_timers.py --json          beside the quickstart's step on a quiet machine
    python benchmarks/quickstart/bench_timers.py --step-s 30     beside a step of so many seconds

Everything that a step measures of itself runs, with nothing in between: each stage's timer with the trackers of a run
(console, jsonl, advice, status), the ranges of the calls, timeline.jsonl with two ranks, and a line of metrics.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from torch.profiler import record_function

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.page import Result, arguments, run
from megarl.metrics.computing.timeline import TimedCall, Timeline
from megarl.metrics.computing.timer import Timer
from megarl.metrics.trackers.trackers import make_trackers

QUICKSTART_STEP_S = 1.423  # median of a whole quickstart on two quiet cores (results/profile_*)
STAGES = (
    "gen",
    "batch",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "log",
)
CALLS = ("columns actor", "columns ref", "columns critic", *["update critic"] * 4, *["update actor"] * 4, "push actor")
NUM_RANKS = 2
NUM_METRICS = 90  # of a step of the quickstart
GOALS = "goal: share_of_step at most 0.005"


def work(options: argparse.Namespace) -> Result:
    if options.step_s <= 0:
        raise ValueError(f"--step-s {options.step_s}: expected seconds above 0")
    num_steps = 20 if options.quick else 500
    with tempfile.TemporaryDirectory(prefix="bench_timers_") as folder, open(os.devnull, "w") as nowhere:
        seconds, wall = measured(Path(folder), Console(file=nowhere), num_steps)
    share = seconds / options.step_s
    row = {
        "stages": len(STAGES), "calls": len(CALLS), "CPU ms of a step": round(1e3 * seconds, 3),
        "wall ms of a step": round(1e3 * wall, 3), "step s": options.step_s, "share": f"{share:.4%}",
    }  # fmt: skip
    configuration = {"steps": num_steps, "step_s": options.step_s, "ranks": NUM_RANKS, "metrics": NUM_METRICS}
    notes = [GOALS, "the share is of the driver's CPU seconds, which other work on the machine does not lengthen"]
    title = "What a step's own measurements cost"
    return Result("timers", options.device, configuration, [row], {"share_of_step": share}, notes, title)


def measured(folder: Path, console: Console, num_steps: int) -> tuple[float, float]:
    """CPU seconds of this thread, and wall seconds, of all that a step measures of itself: means over the steps."""
    trackers = make_trackers(["console"], folder, "megarl", "bench", {}, num_steps, console=console)
    timer, timeline = Timer(on_stage=trackers.stage), Timeline(folder, lambda: calls(timer.began))
    metrics = {f"group/metric_{number}": 0.123456789 for number in range(NUM_METRICS)}
    begun, cpu = time.perf_counter(), time.thread_time()
    for step in range(1, num_steps + 1):
        for stage in STAGES:
            with timer(stage):
                pass
        for call in CALLS:
            with record_function(call):
                pass
        timeline.write(step, timer)
        trackers.log(step, metrics | timer.finish(num_tokens=4096))
    seconds = time.thread_time() - cpu, time.perf_counter() - begun
    trackers.close()
    return seconds[0] / num_steps, seconds[1] / num_steps


def calls(begin: float) -> list[TimedCall]:
    return [TimedCall("ranks_0", name, begin, dict.fromkeys(range(NUM_RANKS), 0.1)) for name in CALLS]


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--step-s", type=float, default=QUICKSTART_STEP_S, help="seconds of the step to compare with")
    return made


if __name__ == "__main__":
    raise SystemExit(run(work, parser()))
