"""The tracker that keeps `status.json` of a run's folder up to date."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from megarl.io.durable_files import StorageError, kept
from megarl.metrics.reading.status import FILE, write_status
from megarl.metrics.trackers.tracker import Run, Tracker

_REFRESH_S = 1.0  # between two writes of the same stage


class StatusTracker(Tracker):
    """Writes {"step": 7, "stage": "update_actor", "since": 1763700000.0, ...} at the beginning of each stage.

    `step` is the last finished one and `since` the time, in seconds since 1970, at which the stage began.
    Every run has this tracker; `reading.status.end_noted` adds how the run ended.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = time.time) -> None:
        self._run_dir, self._clock = run.run_dir, clock
        self._step, self._total = run.resume_step or 0, run.total_steps
        self._stage = ""
        self._since = 0.0
        self._written = 0.0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        now = self._clock()
        if name != self._stage:
            self._stage, self._since = name, now
        elif now - self._written < _REFRESH_S:
            return
        self._written = now
        self._write({"done": done, "total": total} if total else {})

    def close(self, error: BaseException | None = None) -> None:
        if not isinstance(error, StorageError):  # else it says why nothing can be written
            self.stage("ended")

    def _write(self, progress: Mapping[str, int]) -> None:
        status: dict[str, Any] = {"step": self._step, "total_steps": self._total, "stage": self._stage}
        status |= {"since": self._since, **progress, "host": socket.gethostname(), "pid": os.getpid()}
        kept(self._run_dir / FILE, lambda: write_status(self._run_dir, status))
