"""Which processes hold memory of this machine's GPUs, as nvidia-smi tells."""

from __future__ import annotations

import subprocess
import time

ASK_S = 20.0  # nvidia-smi takes seconds where the driver is not loaded


def on_gpus() -> frozenset[str] | None:
    """Numbers of the processes; None if there is no nvidia-smi, or it fails."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=ASK_S).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return frozenset(said.split())


def wait_for_gpus(before: frozenset[str] | None, limit_s: float) -> bool:
    """Wait until no process holds GPU memory that did not `before`, at most `limit_s`; False if one still does.

    The driver frees a killed process's memory some time after the kill.  True where nobody can tell.
    """
    deadline = time.monotonic() + limit_s
    while before is not None and (now := on_gpus()) is not None and now - before:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True
