"""Reads the folder of a run: what is there, finished or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.config.settings import read_yaml
from megarl.metrics.jsonl import Series, read_lines, read_series
from megarl.metrics.report import SAMPLES
from megarl.metrics.timeline import TIMELINE
from megarl.metrics.tokens import TOKENS
from megarl.metrics.trackers.status import read_status

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class RunFolder:
    """Example: RunFolder(Path("runs/quickstart")).series["critic/score/mean"]; files that are not there are empty."""

    path: Path

    def require_metrics(self) -> None:
        """Raises ValueError, one sentence, for a folder without metrics."""
        if not (self.path / METRICS).is_file():
            if self.status:
                raise ValueError(
                    f"{self.path}: the run has no {METRICS}, as it ended before its first step; "
                    f"megarl doctor --run {self.path} says why"
                )
            raise ValueError(f"{self.path}: no {METRICS} there; expected the folder of a run, such as runs/quickstart")

    @cached_property
    def series(self) -> Series:
        return read_series(self.path / METRICS)

    @cached_property
    def seconds(self) -> float:
        """From the first line of the metrics to the last."""
        times = [row["time"] for row in read_lines(self.path / METRICS) if "time" in row]
        return times[-1] - times[0] if times else 0.0

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The settings as the file has them, also of another version of megarl; {} without config.yaml."""
        file = self.path / "config.yaml"
        return read_yaml(file) if file.is_file() else {}

    @property
    def name(self) -> str:
        return self.config.get("trainer", {}).get("experiment_name") or self.path.resolve().name

    @property
    def summary(self) -> dict[str, Any]:
        """{} unless the run has finished."""
        return self._json("summary.json")

    @property
    def status(self) -> dict[str, Any]:
        return read_status(self.path) or {}

    @property
    def owner(self) -> dict[str, Any]:
        """Host, process id and start of the last process that trained in the folder; {} for a folder without one."""
        return self._json("owner.json")

    def samples(self) -> Iterator[dict[str, Any]]:
        return self._lines(SAMPLES)

    def tokens(self) -> Iterator[dict[str, Any]]:
        return self._lines(TOKENS)

    def timeline(self) -> Iterator[dict[str, Any]]:
        return self._lines(TIMELINE)

    def advice(self) -> list[dict[str, Any]]:
        return list(self._lines("advice.jsonl"))

    def rollbacks(self) -> list[dict[str, Any]]:
        return list(self._lines("rollbacks.jsonl"))

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        file = self.path / name
        return read_lines(file) if file.is_file() else iter(())

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        return json.loads(file.read_text()) if file.is_file() else {}
