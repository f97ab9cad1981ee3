"""`megarl train -m`: one run after another, each in its own process, and a table of the results.

A failed run does not affect the others.  The same command resumes a sweep: finished runs are skipped, others resume
from their last checkpoint, as `megarl train` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from megarl.config import Config, ConfigError, SweptRun, read_yaml
from megarl.config.names import AUTO
from megarl.config.settings import show
from megarl.io.durable_files import write_text
from megarl.io.terminal import pages, sentences
from megarl.metrics.report.folder import SWEEP
from megarl.plan.report import report
from megarl.processes.lifetime import die_with_parent

NOT_STARTED, FINISHED, FAILED, INTERRUPTED = "not started", "finished", "failed", "interrupted"


@dataclass(frozen=True)
class Result:
    """The result of one run; None if a value is unknown, for example an accuracy without data.val_files."""

    values: dict[str, Any]
    folder: str
    state: str = NOT_STARTED
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    last_score: float | None = None  # mean over the samples of the last iteration
    seconds: float | None = None  # of the run with its earlier starts; if it did not finish, of this start
    score_before: float | None = None  # where rewards are not just 0 and 1
    score_after: float | None = None


def main(runs: Sequence[SweptRun]) -> int:
    """The exit code: 0 if all are finished, 1 if one failed, 130 after Ctrl-C."""
    console = sentences()
    if any(run.config.trainer.check_only for run in runs):
        for run in runs:
            console.print(f"\n{run.config.trainer.experiment_name}")
            report(run.config)
        return 0
    results = sweep(runs, train, lambda line: console.print(line))
    print_table(results)
    console.print(f"all runs in one page: megarl report {_file(runs).parent}")
    console.print(f"sweep: {_file(runs).resolve()}")
    states = [result.state for result in results]
    return 130 if INTERRUPTED in states else int(FAILED in states)


def sweep(
    runs: Sequence[SweptRun], start: Callable[[SweptRun], int], say: Callable[[str], object] = lambda line: None
) -> list[Result]:
    """Start the runs that are not finished, one after another; returns their results, which are also in sweep.json.

    start: executes a run and returns its exit code, or raises KeyboardInterrupt, which ends the sweep.
    """
    results = []
    for run in runs:
        result = Result(dict(run.values), str(run.config.trainer.run_dir))
        results.append(_with_numbers(result) if is_finished(run.config) else result)
    for i, run in enumerate(runs):
        what = f"run {i + 1} of {len(runs)}: {run.config.trainer.experiment_name}"
        if results[i].state == FINISHED:
            say(f"== {what}: finished before")
        else:
            say(f"== {what}")
            results[i] = _started(results[i], run, start)
        _write(_file(runs), results)
        if results[i].state == INTERRUPTED:
            break
    return results


def train(run: SweptRun) -> int:
    """`megarl train` of one run in a process that ends when this one is interrupted or killed."""
    parent = os.getpid()
    process = subprocess.Popen(
        [sys.executable, "-m", "megarl", "train", *run.words],
        process_group=0,  # Ctrl-C at the terminal reaches only this process, which sends SIGTERM once
        preexec_fn=lambda: die_with_parent(parent, heeds_signals=True),
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()  # it ends its ranks and servers in order
        process.wait()
        raise
    finally:
        process.kill()  # in case of a second Ctrl-C during the wait


def is_finished(config: Config) -> bool:
    """Whether its folder has a finished run with these settings; always False with trainer.resume_mode=disable."""
    now = config.trainer
    written, summary = now.run_dir / "config.yaml", now.run_dir / "summary.json"
    if now.resume_mode == "disable" or not (written.exists() and summary.exists()):
        return False
    try:
        found = read_yaml(written)
    except ConfigError:  # of another version
        return False
    then = replace(found.trainer, resume_mode=now.resume_mode, logger=now.logger)
    engine = found.rollout.engine if config.rollout.engine == AUTO else config.rollout.engine  # what auto was there
    return replace(found, trainer=then) == replace(config, rollout=replace(config.rollout, engine=engine))


def print_table(results: Sequence[Result]) -> None:
    """Print a row for each run; the folders are inside that of the sweep, which `main` prints below."""
    table = Table(title="runs of the sweep", title_justify="left")
    keys = list(results[0].values)
    for name in (*keys, "state", "before", "after", "last score", "seconds", "folder"):
        table.add_column(name, overflow="fold", justify="left" if name in (*keys, "state", "folder") else "right")
    for result in results:
        before = result.score_before if result.accuracy_before is None else result.accuracy_before
        after = result.score_after if result.accuracy_after is None else result.accuracy_after
        scores = (before, after, result.last_score)
        numbers = ["" if score is None else f"{score:.3f}" for score in scores]
        seconds = "" if result.seconds is None else f"{result.seconds:.0f}"
        table.add_row(*map(show, result.values.values()), result.state, *numbers, seconds, Path(result.folder).name)
    pages().print(table)


def _started(result: Result, run: SweptRun, start: Callable[[SweptRun], int]) -> Result:
    began = time.monotonic()
    try:
        code = start(run)
    except KeyboardInterrupt:
        return replace(result, state=INTERRUPTED, seconds=round(time.monotonic() - began, 1))
    if code != 0:
        return replace(result, state=FAILED, seconds=round(time.monotonic() - began, 1))
    return _with_numbers(result)


def _with_numbers(result: Result) -> Result:
    summary = json.loads((Path(result.folder) / "summary.json").read_text())
    names = ("accuracy_before", "accuracy_after", "score_before", "score_after", "last_score")
    return replace(result, state=FINISHED, seconds=summary["wall_s"], **{name: summary.get(name) for name in names})


def _file(runs: Sequence[SweptRun]) -> Path:
    return Path(runs[0].config.trainer.default_local_dir) / SWEEP


def _write(file: Path, results: Sequence[Result]) -> None:
    """Write sweep.json atomically; rows of other sweeps in the same folder stay."""
    file.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(file.read_text())["runs"] if file.exists() else []
    ours = {result.folder for result in results}
    rows = [row for row in before if row["folder"] not in ours] + [asdict(result) for result in results]
    write_text(file, json.dumps({"runs": rows}, indent=2) + "\n")
