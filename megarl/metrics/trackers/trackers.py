"""The trackers of a run: those that `trainer.logger` names, and those that every run has.

A tracker that cannot start stops the run at its start; a tracker that fails later warns once and the run continues.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from megarl.io.durable_files import StorageError
from megarl.io.terminal import pages
from megarl.io.traces import asked, begin
from megarl.metrics.advice.advice import Advisor
from megarl.metrics.advice.rules import RULES
from megarl.metrics.computing.audit import PARTED
from megarl.metrics.computing.audit import sentence as audit_sentence
from megarl.metrics.computing.evaluation import CUT_OFF, OF_EVALUATION, cut_off
from megarl.metrics.reading.jsonl import ADVICE, METRICS, SAMPLES, Followed, append_lines, drop_after
from megarl.metrics.reading.pace import is_step
from megarl.metrics.reading.status import is_stop
from megarl.metrics.trackers.opentelemetry import OpenTelemetryTracker
from megarl.metrics.trackers.status import StatusTracker
from megarl.metrics.trackers.tracker import Run, Tracker, register_tracker
from megarl.plugins.declared import declared

TABLE_COLUMNS = ("step", "prompt", "completion", "ground_truth", "reward")
TABLE_ROWS = 64  # of a table of samples: the last ones
STEP = "training/global_step"  # the x axis of all metrics in wandb

log = logging.getLogger(__name__)


@register_tracker("jsonl")
class JsonlTracker(Tracker):
    """`metrics.jsonl`: {"step": 3, "time": 1763700000.0, "kind": "train" or "evaluation", "actor/entropy": ...}."""

    def __init__(self, run: Run) -> None:
        self.path = run.run_dir / METRICS
        # The evaluation after the step of the save is made again.
        drop_after(self.path, run.resume_step, also=lambda row: row["step"] == run.resume_step and "val/score" in row)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        kind = "train" if is_step(metrics) else "evaluation"
        append_lines(self.path, [{"step": step, "time": round(time.time(), 3), "kind": kind, **metrics}])


class AdviceTracker(Tracker):
    """Writes advice about the settings to the console and to `advice.jsonl`: {"step": 50, "advice": "..."}.

    Every run has this tracker; a run without advice has no such file.
    """

    def __init__(self, run: Run) -> None:
        self.path, self._console = run.run_dir / ADVICE, run.console
        self._advisor, self._said_cut = Advisor(RULES, config=run.config, steps=run.total_steps), False
        again = run.resume_step  # the evaluation after the step of the save is made again, and what it says with it
        of_evaluation = (PARTED, CUT_OFF)
        drop_after(self.path, again, also=lambda row: row["step"] == again and row["advice"].startswith(of_evaluation))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        cut = None if self._said_cut else cut_off(metrics)  # once: the next evaluation has the same limit
        self._said_cut |= cut is not None
        sentences = [*self._advisor.advise(step, metrics), *filter(None, [audit_sentence(metrics), cut])]
        for sentence in sentences:
            self._console.print(
                f"advice at step {step}: {sentence}", style="yellow", soft_wrap=True, highlight=False, markup=False
            )
        if sentences:
            append_lines(self.path, [{"step": step, "advice": sentence} for sentence in sentences])


@register_tracker("tensorboard", packages=("tensorboard",))
class TensorBoardTracker(Tracker):
    """Event files in `tensorboard/` of the run's folder."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional, and slow to import

        purge = None if run.resume_step is None else run.resume_step + 1
        self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        self._writer.close()


@register_tracker("wandb", packages=("wandb",))
class WandbTracker(Tracker):
    """Weights & Biases, online or offline as set by WANDB_MODE; a resumed run keeps its id.

    With each evaluation, and at the end, it gets a table of the last samples since the one before.

    wandb's own step only grows, and what is logged for an earlier one is dropped: a step that is made again after a
    resume would keep its first numbers.  So our step is a metric, and the x axis of the others.
    """

    def __init__(self, run: Run) -> None:
        import wandb  # optional, and slow to import

        self._make_table, self._step = wandb.Table, run.resume_step or 0
        self._samples, self._rows = Followed(run.run_dir / SAMPLES), deque[list[Any]](maxlen=TABLE_ROWS)
        self._samples.look()  # those of the run that this one continues are in its tables
        id_file = run.run_dir / "wandb_id"
        if run.resume_step is None or not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            id=id_file.read_text(),
            resume="allow",
            dir=str(run.run_dir),
            config=dict(run.config),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        is_evaluated = any(name.startswith(OF_EVALUATION) for name in metrics)
        self._run.log({**metrics, **(self._tables() if is_evaluated else {}), STEP: step})

    def close(self, error: BaseException | None = None) -> None:
        if tables := self._tables():
            self._run.log({**tables, STEP: self._step})
        self._run.finish(exit_code=0 if error is None or is_stop(error) else 1)

    def _tables(self) -> dict[str, Any]:
        """{} without new samples."""
        _, rows = self._samples.look()
        self._rows.extend([row[name] for name in TABLE_COLUMNS] for row in rows)
        if not self._rows:
            return {}
        table = self._make_table(columns=list(TABLE_COLUMNS), data=list(self._rows))
        self._rows.clear()
        return {"samples": table}


# name in trainer.logger -> module:class, or what makes one
TRACKERS: dict[str, str | Callable[[Run], Tracker]] = {
    name: found.address for name, found in sorted(declared("register_tracker", "metrics/trackers").items())
}


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._failed: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics), f"log step {step}")

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        self._each(lambda tracker: tracker.stage(name, done, total), f"show {name}")

    def close(self, error: BaseException | None = None) -> None:
        """Close all trackers, also after failures.

        `error`: with which the run ends; None: it has done all that it was to do.
        """
        for name, tracker in self._trackers.items():
            try:
                tracker.close(error)
            except Exception as fault:  # the next one still has to be closed
                log.warning("trainer.logger %s did not close: %s", name, one_line(fault))

    def _each(self, act: Callable[[Tracker], None], what: str) -> None:
        for name, tracker in self._trackers.items():
            try:
                act(tracker)
            except StorageError:  # the run has waited for room, and ends
                raise
            except Exception as error:  # an error in a tracker's library must not stop the run
                if name not in self._failed:
                    self._failed.add(name)
                    log.warning("trainer.logger %s could not %s, the run goes on: %s", name, what, one_line(error))


def make_trackers(
    names: Sequence[str],
    run_dir: Path | str,
    project: str,
    experiment: str,
    config_dict: Mapping[str, Any],
    total_steps: int,
    *,
    resume_step: int | None = None,
    console: Console | None = None,
) -> Trackers:
    """Start every tracker of `trainer.logger`, and always jsonl, which curves and summaries read, advice and status.

    Raises: ValueError of one sentence for an unknown name or a tracker that does not start; started ones are closed.
    """
    run = Run(Path(run_dir), project, experiment, config_dict, total_steps, resume_step, console or pages())
    run.run_dir.mkdir(parents=True, exist_ok=True)
    started: dict[str, Tracker] = {}
    for name in dict.fromkeys([*names, "jsonl"]):
        if name not in TRACKERS:
            Trackers(started).close()
            raise ValueError(f"trainer.logger has {name!r}: expected some of {', '.join(TRACKERS)}")
        try:
            started[name] = _class_of(TRACKERS[name])(run)
        except Exception as error:  # libraries raise different errors if they cannot start
            Trackers(started).close()
            raise ValueError(f"trainer.logger has {name!r}, which did not start: {one_line(error)}") from error
    if traces := begin(run.run_dir, "driver", asked()):
        started["opentelemetry"] = OpenTelemetryTracker(run, traces)
    started |= {"advice": AdviceTracker(run), "status": StatusTracker(run)}
    return Trackers(started)


def _class_of(tracker: str | Callable[[Run], Tracker]) -> Callable[[Run], Tracker]:
    if not isinstance(tracker, str):
        return tracker
    module, _, name = tracker.partition(":")
    made: Callable[[Run], Tracker] = getattr(import_module(module), name)
    return made


def one_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
