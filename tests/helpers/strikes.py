"""Runs in which a process is ended, or signalled, in a stage of a step that was named before.

    python strikes.py STRIKES.json train key=value ...

is `megarl train key=value ...` with the strikes to come in the file: [[2, "update_actor", "rank"], ...].  A strike is
taken out of it before it falls, so a run that is started again is not struck by it again.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from programs import runs

from megarl.cli import main
from megarl.io import job_signals
from megarl.metrics.trackers.status import StatusTracker

Strike = tuple[int, str, str]  # step, stage, victim

VICTIMS = {  # the program
    "rank": "megarl.roles.worker",
    "server": "megarl.hf_server.main",
    "collector": "run_collector",
}
ASKS = {number.name: number for number in job_signals.ASKS}


def start(command: str, words: list[str], plan: Sequence[Strike] | None, file: Path, log: Path) -> int:
    """Run a command to its end, struck by `plan`, or by what is left of the last one; returns its exit code."""
    if plan is not None:
        file.write_text(json.dumps(plan))
    with log.open("ab") as out:
        run = [sys.executable, __file__, str(file), command, *words]
        return subprocess.run(run, stdout=out, stderr=out, check=False, start_new_session=True).returncode


def lives(command: str, words: list[str], plan: Sequence[Strike], file: Path, log: Path) -> list[int]:
    """Start a command as often as `plan` ends it, the strikes in the order in which they fall; returns the exit codes.

    The strikes may hit any start, and all must have fallen in the end.
    """
    codes = [start(command, words, plan, file, log)]
    while codes[-1] != 0 and len(codes) <= len(plan):
        codes.append(start(command, words, None, file, log))
    assert codes[-1] == 0, log.read_text()
    assert json.loads(file.read_text()) == [], f"not all strikes fell: {file.read_text()}"
    return codes


def weights(run: Path) -> dict[str, str]:
    """SHA-256 of the files of the exported model."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (run / "hf").glob("*.safetensors")}


def _strike(victim: str) -> None:
    children = psutil.Process().children(recursive=True)
    if victim in ASKS:  # schedulers send it to all processes of a job
        for process in (*children, psutil.Process()):
            process.send_signal(ASKS[victim])
        return
    if victim in VICTIMS:
        children = [next(child for child in children if runs(child, VICTIMS[victim]))]
    for child in children if victim != "driver" else ():
        child.kill()
    if victim in ("driver", "all"):  # all: the power fails
        os.kill(os.getpid(), signal.SIGKILL)


def _strike_in_stages(file: Path) -> None:
    told = StatusTracker.stage

    def stage(self: StatusTracker, name: str, done: int = 0, total: int = 0) -> None:
        told(self, name, done, total)
        plan = json.loads(file.read_text())
        due = next((strike for strike in plan if strike[:2] == [self._step + 1, name]), None)
        if due is not None:
            plan.remove(due)
            other = file.with_suffix(".part")
            other.write_text(json.dumps(plan))
            other.replace(file)
            _strike(due[2])

    StatusTracker.stage = stage  # type: ignore[method-assign]


if __name__ == "__main__":
    _, strikes_to_come, *sys.argv[1:] = sys.argv
    _strike_in_stages(Path(strikes_to_come))
    sys.exit(main())
