"""JSONL files of a run that goes on: each look reads what was added since the last one."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from megarl.metrics.jsonl import Followed, Series
from megarl.metrics.pace import STEP_S, Pace, is_step
from megarl.metrics.report import SAMPLES
from megarl.metrics.timeline import TIMELINE
from megarl.metrics.trackers.status import read_status
from megarl.trainer.owner import started_at

KEPT = 128  # last lines of files of which only the end is shown
METRICS = "metrics.jsonl"


class Run:
    """What is known of a run; `look` brings it up to date."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.series: Series = {}
        self.last_step: dict[str, Any] = {}  # the metrics of the last step; those of an evaluation are another row
        self.pace = Pace()
        self.samples: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.advice: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.timeline: deque[dict[str, Any]] = deque(maxlen=1)
        self.status: dict[str, Any] = {}
        self._metrics = Followed(folder / METRICS)
        self._ends = [
            (Followed(folder / SAMPLES), self.samples),
            (Followed(folder / "advice.jsonl"), self.advice),
            (Followed(folder / TIMELINE), self.timeline),
        ]

    def look(self) -> None:
        """Read what is new.  `status` stays empty until the run has begun its first stage."""
        self.status = read_status(self.folder) or {}
        anew, rows = self._metrics.look()
        if anew:
            self.series.clear()
            self.last_step, self.pace = {}, Pace()
        started = started_at(self.folder) if rows else 0.0
        for row in rows:
            self._take(row, started)
        for file, kept in self._ends:
            anew, rows = file.look()
            if anew:
                kept.clear()
            kept.extend(rows)

    def _take(self, row: dict[str, Any], started: float) -> None:
        """One row of the metrics.  What was before the last start does not tell how fast the run is now."""
        for name, value in row.items():
            if name not in ("step", "time") and value is not None:
                steps, values = self.series.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(value)
        if is_step(row):
            self.last_step = row
            if row["time"] >= started:
                self.pace.note(row["step"], row["time"], row[STEP_S])

    def last(self, name: str) -> float | None:
        """The last value of a metric."""
        values = self.series.get(name, ([], []))[1]
        return values[-1] if values else None
