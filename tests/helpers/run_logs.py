"""Logs of a run that has no ranks."""

from pathlib import Path
from typing import Any

from config_helpers import load

from megarl.metrics.computing.audit import Audit
from megarl.metrics.computing.timeline import Timeline
from megarl.metrics.computing.timer import Timer
from megarl.trainer.telemetry.run_log import RunLog, StepMetrics, Totals


def run_log(folder: Path, trackers: Any) -> RunLog:
    """One whose timeline has no calls, and which knows no devices."""
    timeline = Timeline(folder, list)
    return RunLog(Timer(), trackers, Totals(0.0, {}), folder, 1, timeline, None, Audit(), StepMetrics(load(), 100, {}))
