"""Which process of a run works when within a step: CPU time of each of them by stage, and a picture of a mean step.

    python benchmarks/quickstart/bench_profile.py                          the quickstart's GRPO on two cores
    python benchmarks/quickstart/bench_profile.py --words rollout.num_servers=2     with further words

It runs `megarl train` and reads every 5 ms how much CPU time each of its processes has used (/proc/PID/stat, in ticks
of 10 ms).  The steps are laid over each other, stage by stage, so that ticks become shares of a core.  What comes
before the first step (start) and after the last one (end) is told in whole.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.page import PICTURE, ROOT, Result, arguments, run
from megarl.metrics.reading.jsonl import read_lines

PAUSE_S, LOOK_S = 0.005, 0.5  # between two readings, between two looks for new processes
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
BINS = 60  # of a mean step
DRIVER, NAME = "driver", "profiled"
START, END = "start", "end"


class Reading(NamedTuple):
    """CPU seconds that a process has used since the reading before, which was at most some ms ago."""

    time: float  # time.time()
    process: str
    cpu_s: float


class Step(NamedTuple):
    """Times are time.time(); stages of depth 0 in their order."""

    begin: float
    end: float
    stages: list[tuple[str, float]]  # name, begin


class Sampled(NamedTuple):
    """A run; times are time.time()."""

    begin: float
    end: float
    readings: list[Reading]


class Sampler(threading.Thread):
    """Reads the CPU time of a process and of all below it until `stop` is set."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self._found: list[tuple[float, int, float]] = []  # time, process id, CPU seconds
        self._root, self._names, self._used = psutil.Process(pid), dict[int, str](), dict[int, int]()
        self._ended: set[int] = set()

    @property
    def readings(self) -> list[Reading]:
        """Under the last name of each process: one that is forked is called otherwise at first."""
        return [Reading(at, self._names[pid], seconds) for at, pid, seconds in self._found]

    def run(self) -> None:
        looked = 0.0
        while not self.stop.wait(PAUSE_S):
            if time.monotonic() - looked > LOOK_S:
                with suppress(psutil.NoSuchProcess):
                    self._look()
                looked = time.monotonic()
            for pid in self._names.keys() - self._ended:
                self._read(pid)

    def _look(self) -> None:
        for process in [self._root, *self._root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                self._ended.discard(process.pid)
                words = process.cmdline()
                if words or process.pid not in self._names:  # one that ends has none any more
                    name = name_of(words, process.name(), process.pid)
                    self._names[process.pid] = DRIVER if process == self._root else name

    def _read(self, pid: int) -> None:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            self._ended.add(pid)
            return
        used = int(fields[11]) + int(fields[12])  # utime and stime, in proc(5) fields 14 and 15
        before = self._used.get(pid, 0)  # it is not older than the run
        self._used[pid] = used
        if used > before:
            self._found.append((time.time(), pid, (used - before) * TICK_S))


def name_of(words: Sequence[str], name: str, pid: int) -> str:
    """Of a process, by its own name (forks and children of ours have one), or by its module; its process id.

    >>> name_of(["python", "-m", "megarl.hf_server.main", "--port", "1"], "python", 7)
    'hf_server.main 7'
    """
    if not name.startswith("python"):
        return f"{name} {pid}"
    if any("multiprocessing" in word for word in words):  # rewards and agents run in processes of it
        return f"multiprocessing {pid}"
    module = next((words[at + 1] for at, word in enumerate(words[:-1]) if word == "-m"), "")
    return f"{module.removeprefix('megarl.') or Path(words[0]).name if words else 'ended'} {pid}"


def steps_of(folder: Path) -> list[Step]:
    """The steps of a run."""
    ends = {row["step"]: row["time"] for row in read_lines(folder / "metrics.jsonl") if "timing_s/step" in row}
    lasted = {
        row["step"]: row["timing_s/step"] for row in read_lines(folder / "metrics.jsonl") if "timing_s/step" in row
    }
    found = []
    for row in read_lines(folder / "timeline.jsonl"):
        if (number := row["step"]) in ends:
            begin = ends[number] - lasted[number]
            stages = [(name, begin + at) for name, at, _, depth in row["stages"] if depth == 0]
            found.append(Step(begin, ends[number], sorted(stages, key=lambda stage: stage[1])))
    return found


def by_stage(steps: Sequence[Step], readings: Sequence[Reading]) -> dict[str, dict[str, float]]:
    """CPU seconds of a mean step: process -> stage -> seconds.  What is before the first stage counts to it."""
    found: dict[str, dict[str, float]] = {}
    begins = [step.begin for step in steps]
    for reading in readings:
        step = steps[max(0, bisect_right(begins, reading.time) - 1)]
        if not step.begin <= reading.time < step.end:
            continue
        place = max(0, bisect_right([begin for _, begin in step.stages], reading.time) - 1)
        stages = found.setdefault(reading.process, {})
        name = step.stages[place][0]
        stages[name] = stages.get(name, 0.0) + reading.cpu_s / len(steps)
    return found


def around(run: Sampled, steps: Sequence[Step]) -> dict[str, dict[str, float]]:
    """CPU seconds before the first step and after the last one: process -> start or end -> seconds."""
    found: dict[str, dict[str, float]] = {}
    for reading in run.readings:
        if not steps[0].begin <= reading.time < steps[-1].end:
            phases = found.setdefault(reading.process, {})
            name = START if reading.time < steps[0].begin else END
            phases[name] = phases.get(name, 0.0) + reading.cpu_s
    return found


def seconds_of_stages(steps: Sequence[Step]) -> dict[str, float]:
    """The mean time by the clock of each stage, until the next one begins."""
    found: dict[str, list[float]] = {}
    for step in steps:
        ends = [begin for _, begin in step.stages[1:]] + [step.end]
        sums: dict[str, float] = {}
        for (name, begin), end in zip(step.stages, ends, strict=True):
            sums[name] = sums.get(name, 0.0) + end - begin
        for name, seconds in sums.items():
            found.setdefault(name, []).append(seconds)
    return {name: sum(each) / len(steps) for name, each in found.items()}


def lanes(steps: Sequence[Step], readings: Sequence[Reading]) -> dict[str, list[float]]:
    """Share of a core of each process in each of BINS parts of a mean step."""
    mean = statistics.mean(step.end - step.begin for step in steps)
    found: dict[str, list[float]] = {}
    begins = [step.begin for step in steps]
    for reading in readings:
        step = steps[max(0, bisect_right(begins, reading.time) - 1)]
        if step.begin <= reading.time < step.end:
            part = int(BINS * (reading.time - step.begin) / (step.end - step.begin))
            lane = found.setdefault(reading.process, [0.0] * BINS)
            lane[part] += reading.cpu_s / len(steps) / (mean / BINS)
    return found


def draw(stages: Mapping[str, float], found: Mapping[str, Sequence[float]], file: Path) -> None:
    """A lane for each process, darker where it uses more of a core, and the stages above."""
    names = sorted(found, key=lambda name: -sum(found[name]))
    whole = sum(stages.values())
    figure = Figure(figsize=(10.5, 1.2 + 0.42 * len(names)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    picture = axes.imshow(
        [found[name] for name in names], aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=(0, whole, len(names), 0)
    )
    axes.set_yticks([number + 0.5 for number in range(len(names))], names, fontsize=8)
    at = 0.0
    for name, seconds in stages.items():
        axes.axvline(at, color="black", lw=0.6, alpha=0.5)
        if seconds > 0.03 * whole:
            axes.text(at + seconds / 2, -0.12, name, ha="center", va="bottom", fontsize=7)
        at += seconds
    axes.set_xlabel("seconds of a mean step")
    figure.colorbar(picture, ax=axes, label="share of a core")
    figure.savefig(str(file))


def work(options: argparse.Namespace) -> Result:
    if options.device != "cpu":
        raise ValueError(f"--device {options.device}: a GPU's work is not in /proc; expected --device cpu")
    num_steps = 4 if options.quick else options.iterations
    with tempfile.TemporaryDirectory(prefix="bench_profile_") as folder:
        sampled = sample([f"recipe={options.recipe}", *options.words], num_steps, Path(folder), options.limit_s)
        every = steps_of(Path(folder) / "runs" / NAME)
    steps, readings = every[1 if options.quick else 3 :], sampled.readings
    stages, used, beside = seconds_of_stages(steps), by_stage(steps, readings), around(sampled, every)
    clock = {START: every[0].begin - sampled.begin, END: sampled.end - every[-1].end}
    rows: list[dict[str, Any]] = [row_of("by the clock", stages, clock)]
    for name in sorted(used.keys() | beside.keys(), key=lambda name: -sum(used.get(name, {}).values())):
        rows.append(row_of(name, used.get(name, {}), beside.get(name, {})))
    configuration = {"recipe": options.recipe, "words": list(options.words), "steps": len(steps)}
    notes = [
        "seconds of a mean step, and those of start and end in whole: by the clock, and CPU time of each process",
        f"![Processes of a step]({PICTURE})",
    ]
    picture = lanes(steps, readings)
    busy = sum(sum(each.values()) for each in used.values()) / sum(stages.values())
    return Result(
        "profile",
        "cpu",
        configuration,
        rows,
        {"busy_cores": busy},
        notes,
        "Which process works when within a step",
        draw=lambda file: draw(stages, picture, file),
    )


def row_of(process: str, stages: Mapping[str, float], around: Mapping[str, float]) -> dict[str, Any]:
    """Start, the stages of a mean step, their sum, and end."""
    middle = {**rounded(stages), "step": round(sum(stages.values()), 3)}
    start, end = (round(around.get(name, 0.0), 2) for name in (START, END))
    return {"process": process, START: start, **middle, END: end}


def sample(words: Sequence[str], num_steps: int, folder: Path, limit_s: float) -> Sampled:
    """Run it in the folder; what its processes used.  RuntimeError with its last line if it fails."""
    where = [f"trainer.total_training_steps={num_steps}", f"trainer.experiment_name={NAME}", "trainer.test_freq=-1"]
    command, log = [sys.executable, "-m", "megarl", "train", *where, *words], folder / "log"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    begin = time.time()
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, cwd=folder, env=env) as process:
        sampler = Sampler(process.pid)
        sampler.start()
        try:
            code = process.wait(limit_s)
        finally:
            process.terminate()
            sampler.stop.set()
            sampler.join()
    if code:
        raise RuntimeError(f"the run ended with exit code {code}: {' '.join(log.read_text().splitlines()[-1:])}")
    return Sampled(begin, time.time(), sampler.readings)


def rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: round(number, 3) for name, number in numbers.items()}


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--recipe", default="quickstart_grpo", help="default: quickstart_grpo")
    made.add_argument("--words", nargs="*", default=[], help="further words of the run")
    made.add_argument("--iterations", type=int, default=30, help="steps of the run (default 30)")
    made.add_argument("--limit-s", type=float, default=900.0, help="of the run (default 900)")
    return made


if __name__ == "__main__":
    raise SystemExit(run(work, parser()))
