"""The noun that trackers are started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console


@dataclass(frozen=True)
class Run:
    """What a tracker is told about the run.  Example: Run(Path("runs/try"), "megarl", "try", {...}, 420)."""

    run_dir: Path
    project: str
    experiment: str
    config: Mapping[str, Any]  # resolved, nested, plain values
    total_steps: int
    resume_step: int | None = None  # the step of the checkpoint that the run goes on from; None: a fresh run
    console: Console = field(default_factory=Console)
