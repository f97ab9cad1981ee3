"""`status.json` in a run's folder: what the run is doing now, for whoever looks from outside."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megarl.metrics.trackers.run import Run

FILE = "status.json"
STOPS = ("Terminated", "KeyboardInterrupt")  # kinds of an end that somebody asked for, by SIGTERM or Ctrl-C
_REFRESH_S = 1.0  # between two writes of the same stage


class StatusTracker:
    """Writes {"step": 7, "stage": "update_actor", "since": 1763700000.0, ...} at the beginning of each stage.

    `step` is the last finished one and `since` the time, in seconds since 1970, at which the stage began.  The file is
    replaced as a whole, so a reader never sees half of it.  Every run has this tracker.  See `end_noted` for its end.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = run.run_dir / FILE, clock
        self._step, self._total = run.resume_step or 0, run.total_steps
        self._stage, self._since, self._written = "", 0.0, 0.0

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

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        self.stage("ended")

    def _write(self, progress: Mapping[str, int]) -> None:
        status: dict[str, Any] = {"step": self._step, "total_steps": self._total, "stage": self._stage}
        status |= {"since": self._since, **progress, "host": socket.gethostname(), "pid": os.getpid()}
        _replace(self.path, status)


@contextmanager
def end_noted(run_dir: Path) -> Iterator[None]:
    """Note in status.json how the block ended: {..., "end": {"time": 1763700000.0, "error": "RankError", "why": ""}}.

    `error` is null for a run that came to its end, and else the kind of the exception, SIGTERM's and Ctrl-C's too.  A
    run that was killed has no "end".
    """
    error, why = None, ""
    try:
        yield
    except BaseException as stop:
        error, why = type(stop).__name__, str(stop)
        raise
    finally:
        status = read_status(run_dir)
        if status is not None:  # else it ended before its first stage
            with suppress(OSError):  # a full disk: why the run ends is the error that it raises
                _replace(run_dir / FILE, status | {"end": {"time": time.time(), "error": error, "why": why}})


def _replace(path: Path, status: Mapping[str, Any]) -> None:
    other = path.with_name(FILE + ".part")
    other.write_text(json.dumps(status) + "\n")
    os.replace(other, path)


def is_stop(error: BaseException) -> bool:
    """Whether somebody asked the run to end with this."""
    return type(error).__name__ in STOPS


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """The status of a run; None before its first stage."""
    file = run_dir / FILE
    return json.loads(file.read_text()) if file.exists() else None
