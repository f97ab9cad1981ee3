"""What generation ahead of the training brings, and what it costs: megarl's orders beside each other and beside others.

    python benchmarks/async_training/bench_async.py --json                       all three parts
    python benchmarks/async_training/bench_async.py --parts learning --engine sglang
    python benchmarks/async_training/bench_async.py --parts simulation --servers 1000

learning     GRPO on the quickstart's model with answers of a long tail: rollout.ahead=2 beside 0, on two servers
trace        the run's own collectors and prefetcher against servers that only sleep: both orders at the same `ahead`
simulation   the same trace in virtual time up to 1,000 servers, beside rules that throw away what is late

wall_ratio and accuracy_difference are those of learning; trace_ratio is order=finished over order=prompts; lost and
doubled count visits of prompts in learning and trace, and must be 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.async_training import learning, loopback, simulation
from benchmarks.common.page import Result, arguments, run
from benchmarks.rollout.bench_rollout import obstacle

PARTS = ("learning", "trace", "simulation")
GOALS = (
    "goals: wall_ratio at most 0.75 with accuracy_difference within 0.02; trace_ratio at most 0.4; lost and doubled 0"
)
LEGEND = (
    "step: seconds in learning; in trace and simulation in units of a completion of mean length, of which the training "
    "takes half of one. idle: share of the time. token age: pushes between a token and its training. KS distance, mean "
    "length, longest 5 %: the trained lengths against the trace's law; 0, 1 and 1 are unbiased (in learning and trace "
    "the mean length is in tokens). drop: a group is thrown away when its weights are more than `ahead` pushes old; "
    "requeue: and its prompt is asked again; first of 1.5 B: the first of 1.5 times as many are taken, without `ahead`."
)


def work(options: argparse.Namespace) -> Result:
    if options.device != "cpu":
        raise ValueError(f"--device {options.device}: servers that sleep need no GPU; expected --device cpu")
    if "learning" in options.parts and (missing := obstacle(options.engine)):
        raise ValueError(f"--engine {options.engine}: {missing}; expected hf, or that environment")
    of_learning, of_trace, sizes = settings(options)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    configuration: dict[str, Any] = {"parts": " ".join(options.parts)}
    begun = time.monotonic()

    def say(line: str) -> None:
        sys.stderr.write(f"{time.monotonic() - begun:6.0f} s  {line}\n")

    with tempfile.TemporaryDirectory(prefix="bench_async_") as name:
        folder = Path(name)
        if "learning" in options.parts:
            found = learning.rows(options.engine, of_learning, folder, say)
            rows += found
            ratios |= learning.ratios(found)
            configuration[f"learning, {options.engine}"] = _said(asdict(of_learning))
        if "trace" in options.parts:
            strict, finished = loopback.rows(of_trace, simulation.read_trace(), folder, say)
            rows += [strict, finished]
            ratios["trace_ratio"] = finished["seconds"] / strict["seconds"]
            configuration["trace"] = _said(asdict(of_trace))
    if ratios:
        ratios |= {name: sum(row[name] for row in rows) for name in ("lost", "doubled")}
    if "simulation" in options.parts:
        rows += simulation.rows(sizes, say)
        how = {"ahead": simulation.AHEAD, "train": simulation.TRAIN_S}
        configuration["simulation"] = _said(how | {"places": sizes[-1].places})
    return Result("async", "cpu", configuration, rows, ratios, [GOALS, LEGEND], "Ahead of the training")


def settings(
    options: argparse.Namespace,
) -> tuple[learning.Setting, loopback.Setting, tuple[simulation.Size, ...]]:
    """The sizes of the three parts."""
    of_learning = learning.QUICK if options.quick else learning.USUAL
    changes = {"steps": options.steps, "rounds": options.rounds, "sleep_ms": options.decode_sleep_ms}
    of_learning = replace(of_learning, **{name: value for name, value in changes.items() if value is not None})
    if of_learning.steps <= of_learning.warmup:
        raise ValueError(f"--steps {of_learning.steps}: expected more than the {of_learning.warmup} that do not count")
    sizes = simulation.QUICK if options.quick else simulation.SIZES
    if options.servers is not None:
        sizes = (simulation.Size(options.servers, sizes[-1].places, sizes[-1].steps),)
    return of_learning, loopback.QUICK if options.quick else loopback.USUAL, sizes


def _said(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def parser() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    found.add_argument("--engine", choices=("hf", "sglang"), default="hf", help="of the part `learning`")
    found.add_argument("--steps", type=int, help="of a run of the part `learning`")
    found.add_argument("--rounds", type=int, help="of the part `learning`: runs of each side")
    found.add_argument("--decode-sleep-ms", type=float, help="of the part `learning`: of a decode step")
    found.add_argument("--servers", type=int, help="of the part `simulation`, in place of its sizes")
    return found


if __name__ == "__main__":
    raise SystemExit(run(work, parser()))
