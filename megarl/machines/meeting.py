"""The port at which the driver listens, when nobody named one: a file in the run's folder tells it to the others.

Whoever could write a wrong port there gains nothing: both sides prove that they have the run's token.
"""

from __future__ import annotations

import os
from pathlib import Path

_FILE = "driver_port"


def announce(run_dir: Path, port: int) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    part = run_dir / f".{_FILE}.{os.getpid()}"
    part.write_text(f"{port}\n")
    part.rename(run_dir / _FILE)


def announced(run_dir: Path) -> int:
    """The port of the run's driver, or of one that has ended.  Raises OSError if there was none yet."""
    return int((run_dir / _FILE).read_text())


def forget(run_dir: Path) -> None:
    (run_dir / _FILE).unlink(missing_ok=True)
