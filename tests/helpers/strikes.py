"""A plug-in of a run that ends one of its processes, or signals it, in a stage that was named before.

    STRIKES=strikes.json megarl train algorithm.plugins=[strikes.py] ...

The file has the strikes to come: [{"step": 2, "stage": "update_actor", "victim": "rank"}, ...].  A strike is taken out
of it before it falls, so a run that is started again is not struck by it again.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil

from megarl.metrics.status import StatusTracker

VICTIMS = {  # a word of its command line
    "rank": "megarl.roles.worker",
    "server": "megarl.hf_server.main",
    "collector": "from multiprocessing import spawn",
}
SIGNALS = {"driver": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGUSR1": signal.SIGUSR1}  # to the driver


def strike(victim: str) -> None:
    if victim in SIGNALS:
        os.kill(os.getpid(), SIGNALS[victim])
        return
    children = psutil.Process().children(recursive=True)
    if victim != "all":  # then the power fails
        children = [next(c for c in children if any(VICTIMS[victim] in word for word in c.cmdline()))]
    for child in children:
        child.kill()
    if victim == "all":
        os.kill(os.getpid(), signal.SIGKILL)


def due(step: int, stage: str) -> str | None:
    """The victim of the strike of this stage, which is taken out of the file."""
    file = Path(os.environ["STRIKES"])
    strikes = json.loads(file.read_text())
    for at, found in enumerate(strikes):
        if (found["step"], found["stage"]) == (step, stage):
            other = file.with_suffix(".part")
            other.write_text(json.dumps(strikes[:at] + strikes[at + 1 :]))
            other.replace(file)
            return str(found["victim"])
    return None


def struck(self: StatusTracker, name: str, done: int = 0, total: int = 0) -> None:
    told(self, name, done, total)
    if (victim := due(self._step + 1, name)) is not None:
        strike(victim)


told = StatusTracker.stage
if "STRIKES" in os.environ:
    StatusTracker.stage = struck  # type: ignore[method-assign]
