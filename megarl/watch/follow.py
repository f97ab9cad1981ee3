"""JSONL files of a run that goes on: each look reads what was added since the last one."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from megarl.metrics.jsonl import Followed
from megarl.metrics.plots import Series
from megarl.metrics.report import SAMPLES
from megarl.metrics.timeline import TIMELINE
from megarl.metrics.trackers.status import read_status

KEPT = 128  # last lines of files of which only the end is shown
METRICS = "metrics.jsonl"


class Run:
    """What is known of a run; `look` brings it up to date."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.series: Series = {}
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
        """Raises ValueError, one sentence, for a folder that is none of a run."""
        status = read_status(self.folder)
        if status is None:
            wanted = "expected the folder of a run, such as runs/quickstart"
            raise ValueError(f"{self.folder}: no status.json there; {wanted}")
        self.status = status
        anew, rows = self._metrics.look()
        if anew:
            self.series.clear()
        for row in rows:
            for name, value in row.items():
                if name not in ("step", "time") and value is not None:
                    steps, values = self.series.setdefault(name, ([], []))
                    steps.append(row["step"])
                    values.append(value)
        for file, kept in self._ends:
            anew, rows = file.look()
            if anew:
                kept.clear()
            kept.extend(rows)

    def last(self, name: str) -> float | None:
        """The last value of a metric."""
        values = self.series.get(name, ([], []))[1]
        return values[-1] if values else None
