"""Console output of a run: a line per step, and below it a progress bar with the current stage of the step.

If the output is not a terminal, only the lines are printed, without bar and colours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from megarl.io.terminal import one_line, say
from megarl.metrics.computing.evaluation import CORE
from megarl.metrics.reading.pace import STEP_S, Pace, clock_text, is_step
from megarl.metrics.trackers.tracker import Run, Tracker, register_tracker

# (label, metric, format); metrics that a step does not have are left out
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("score", "critic/score/mean", ".3f"),
    *(("loss", f"{stage}/loss", ".4f") for stage in ("sft", "rm", "dpo")),
    *(("accuracy", f"{stage}/accuracy", ".3f") for stage in ("rm", "dpo")),
    ("pg_loss", "actor/pg_loss", "+.4f"),
    ("vf_loss", "critic/vf_loss", ".4f"),
    ("ppo_kl", "actor/ppo_kl", "+.1e"),
    ("kl", "actor/kl_loss", ".1e"),
    ("divergence", "distill/divergence", ".3f"),
    ("entropy", "actor/entropy", ".3f"),
    ("grad", "actor/grad_norm", ".2f"),
    ("len", "response_length/mean", ".1f"),
    ("gap", "rollout_corr/log_prob_gap_max", ".1e"),
    ("tok/s", "perf/throughput_total", ".0f"),
)


note = say  # a sentence that belongs to no step, beside the results


def warn(sentence: str) -> None:
    """Print a warning that belongs to no step."""
    say(f"warning: {sentence}")


@register_tracker("console")
class ConsoleTracker(Tracker):
    """Prints lines and progress bar with rich."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = run.console
        self._total = run.total_steps
        self._clock = clock
        self._step, self._pace = run.resume_step or 0, Pace()
        self._progress = Progress(
            TextColumn("[bold]step {task.fields[step]}/{task.fields[of]}[/]"),
            TextColumn("[cyan]{task.description:<14}[/]"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("[dim]eta {task.fields[eta]}[/]"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, step=self._step + 1, of=self._total, count="", eta="?")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a line.  Metrics of an evaluation get their own line."""
        checks = [_check(name, value, metrics) for name, value in metrics.items() if is_core(name)]
        if checks:
            self._line(step, checks)
        if is_step(metrics):
            self._finish_step(step, metrics[STEP_S])
            columns = [f"{label} {metrics[name]:{style}}" for label, name, style in COLUMNS if name in metrics]
            self._line(step, [*columns, f"{metrics[STEP_S]:.2f} s", f"eta {self.eta}"])

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """Draw the bar; it appears with the first stage of a run."""
        self._progress.start()
        count = f"{done}/{total}" if total else ""
        fields: dict[str, Any] = {"step": min(self._step + 1, self._total), "count": count, "eta": self.eta}
        self._progress.update(self._task, description=name, completed=done, total=total or None, **fields)

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        self._progress.stop()

    @property
    def eta(self) -> str:
        """Time to the end of the last step; "?" before the end of the first one."""
        return clock_text(self._pace.seconds_left(self._total))

    def _finish_step(self, step: int, seconds: float) -> None:
        self._pace.note(step, self._clock(), seconds)
        self._step = step
        fields: dict[str, Any] = {"step": min(step + 1, self._total), "of": self._total, "count": "", "eta": self.eta}
        self._progress.reset(self._task, total=None, description="", **fields)  # drops fields that are not passed

    def _line(self, step: int, parts: list[str]) -> None:
        width = len(str(self._total))
        text = "  ".join([f"step {step:>{width}}/{self._total}", *parts])
        self._console.print(one_line(text), soft_wrap=True, highlight=self._console.is_terminal, markup=False)


def is_core(name: str) -> bool:
    """Of an evaluation: what it found in all, and the core metrics of each set."""
    return name.startswith(("val/", f"{CORE}/")) and name not in ("val/score_stderr", "val/version")


def _check(name: str, value: float, metrics: Mapping[str, float]) -> str:
    error = metrics.get("val/score_stderr") if name == "val/score" else None
    return f"{name} {value:.3f}" + (f" ± {error:.3f}" if error is not None else "")
