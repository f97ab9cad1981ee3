"""A plug-in of SGLang that sleeps in every decode step, as a server on a machine of its own would compute."""

from __future__ import annotations

import functools
import os
import shutil
import time
from importlib import import_module
from pathlib import Path
from typing import Any

VARIABLE = "BENCH_DECODE_SLEEP_MS"


def setup() -> None:
    """Called by SGLang in each of its processes."""
    seconds = float(os.environ[VARIABLE]) / 1000
    scheduler = import_module("sglang.srt.managers.scheduler").Scheduler
    compute = scheduler.run_batch

    @functools.wraps(compute)
    def run_batch(self: Any, batch: Any, *args: Any, **options: Any) -> Any:
        if batch.forward_mode.is_decode():
            time.sleep(seconds)
        return compute(self, batch, *args, **options)

    scheduler.run_batch = run_batch


def installed(environment: dict[str, str], folder: Path, sleep_ms: float) -> dict[str, str]:
    """The environment of a server that loads this plug-in from `folder`."""
    about = folder / "sglang_sleep.dist-info"
    about.mkdir(parents=True)
    shutil.copy(__file__, folder)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang_sleep\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\nsleep = sglang_sleep:setup\n")
    path = f"{environment['PYTHONPATH']}:{folder}"
    return {**environment, "PYTHONPATH": path, VARIABLE: str(sleep_ms)}
