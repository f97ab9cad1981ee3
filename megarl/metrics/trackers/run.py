"""The description of a run that trackers get at their start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from megarl.terminal import pages


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
