"""Runs a command whose output goes into a log, and ends all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TIMEOUT_S, END_S = 900.0, 30.0


class CommandFailed(RuntimeError):
    """The command failed, or did not end in time; the message holds the end of its log."""


def execute(command: Sequence[str], log: Path, variables: dict[str, str], timeout_s: float = TIMEOUT_S) -> None:
    """Run it in the log's folder, in a session of its own.  CommandFailed for any exit code but 0."""
    ours = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    env = {**kept, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **variables}
    name = f"{' '.join(command[:4])} ..."
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=env, cwd=log.parent, start_new_session=True) as process,
    ):
        try:
            if code := process.wait(timeout_s):
                end(process, END_S)  # what it started may go on
        except subprocess.TimeoutExpired:
            end(process, END_S)
            raise CommandFailed(f"{name}: not done after {timeout_s:g} s; its log ends: {_last(log)}") from None
        except BaseException:
            end(process, END_S)
            raise
    if code:
        reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}, expected 0"
        raise CommandFailed(f"{name}: {reason}; it said: {_last(log)}")


def end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Ask it first, so that it ends what it started; then kill what is left of its session, which is its own."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last(log: Path) -> str:
    return " / ".join(log.read_text().strip().splitlines()[-3:])
