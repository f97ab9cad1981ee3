"""`megarl doctor --run RUN`: why a run stopped, in one sentence, and the next thing to do."""

from __future__ import annotations

import json

from megarl.doctor.request import Request
from megarl.doctor.run_folder import FAILED, KILLED, explain
from megarl.terminal import sentences

EXIT_FAILED = 1


def main(request: Request) -> int:
    """0: the run goes on, has finished, or was asked to stop; 1: it failed or was killed."""
    assert request.run is not None, "a folder was given"
    found = explain(request.run)
    if request.json:
        print(json.dumps(found._asdict(), indent=2))
    else:
        console = sentences()
        lines = [f"{request.run}: {found.state}", f"cause: {found.cause}", f"next: {found.next}"]
        for line in [*lines, *(f"  {line}" for line in found.evidence)]:
            console.print(line)
    return EXIT_FAILED if found.state in (FAILED, KILLED) else 0
