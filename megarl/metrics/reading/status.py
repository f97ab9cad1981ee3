"""`status.json` in a run's folder: what the run is doing now, and how it ended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FILE = "status.json"
STOPS = ("Terminated", "KeyboardInterrupt")  # kinds of an end that somebody asked for, by SIGTERM or Ctrl-C


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
                write_status(run_dir, status | {"end": {"time": time.time(), "error": error, "why": why}})


def write_status(run_dir: Path, status: Mapping[str, Any]) -> None:
    """Replace the file as a whole, so that a reader never sees half of it."""
    part = run_dir / f"{FILE}.part"
    part.write_text(json.dumps(status) + "\n")
    os.replace(part, run_dir / FILE)


def is_stop(error: BaseException) -> bool:
    """Whether somebody asked the run to end with this."""
    return type(error).__name__ in STOPS


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """The status of a run; None before its first stage."""
    file = run_dir / FILE
    return json.loads(file.read_text()) if file.exists() else None
