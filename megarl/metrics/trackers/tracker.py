"""What a tracker is: the base class, the description of a run that it gets, and the decorator that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from megarl.io.terminal import pages


@dataclass(frozen=True)
class Run:
    """A run as a tracker sees it.  Example: Run(Path("runs/try"), "megarl", "try", {...}, 420)."""

    run_dir: Path
    project: str
    experiment: str
    config: Mapping[str, Any]  # resolved, nested, plain values
    total_steps: int
    resume_step: int | None = None  # the step of the checkpoint from which the run resumes; None: a fresh run
    console: Console = field(default_factory=pages)


class Tracker:
    """Receives metrics.  Steps count from 1; step 0 has the measurements before the first step.

    The constructor gets a Run.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise NotImplementedError

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """The current stage of the running step and its progress; total 0 if unknown."""

    def close(self, error: BaseException | None = None) -> None:
        """`error`: with which the run ends; None: it has done all that it was to do."""


Class = TypeVar("Class", bound=type[Tracker])


def register_tracker(name: str, *, packages: tuple[str, ...] = ()) -> Callable[[Class], Class]:  # noqa: ARG001
    """Decorator: the class in a file of this folder is the tracker `name` of trainer.logger.

    `packages`: what it imports that megarl does not require; setup.py has an extra of its name with them.

    Example:
        @register_tracker("csv")
        class CsvTracker(Tracker): ...

    Both are read from the source (plugins.declared), so that only the trackers in use are imported.
    """
    return lambda tracker: tracker
