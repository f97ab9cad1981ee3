"""`megarl watch RUN`: draws the page, again and again until the run ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.live import Live

from megarl.commands.watch.page import Run, page
from megarl.io.terminal import pages
from megarl.plugins.options import Options, folder, positive
from megarl.trainer.run_lock import has_owner

FILE_WIDTH = 160  # of a page that goes to a file


class Request(NamedTuple):
    run: Path
    every: float  # seconds between two looks
    once: bool  # one page, as for a file or a mail


def parse(words: Sequence[str]) -> Request:
    """Raises ValueError, one sentence, for words that are no request."""
    return Request(**OPTIONS.values(words))


def main(request: Request) -> int:
    """Raises ValueError for a folder that is none of a run.  Ctrl-C ends the page."""
    run, console = Run(request.run), pages()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    is_running = has_owner(request.run)
    run.look()
    if not run.status and not is_running:
        wanted = "expected the folder of a run, such as runs/quickstart"
        raise ValueError(f"{request.run}: no status.json there; {wanted}")
    if is_running and console.is_terminal and not request.once:
        with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
            while is_running:
                live.update(page(run, is_running=True), refresh=True)
                time.sleep(request.every)
                is_running = has_owner(request.run)
                run.look()
        is_running = has_owner(request.run)
    console.print(page(run, is_running=is_running))
    return 0


OPTIONS = Options(
    "watch",
    """Shows what a run is doing, until it ends: stage, time to its end, curves, stages of the last step and its slowest
ranks, servers, last samples, advice and faults. It reads the folder's files alone, so it works on any machine
that sees them. Ctrl-C ends the page, not the run.""",
    ["megarl watch runs/quickstart", "ssh node-0 megarl watch /shared/runs/big --once"],
)
OPTIONS.add_argument("run", type=folder, help="the folder of a run, such as runs/quickstart")
OPTIONS.add_argument("--every", type=positive, default=2.0, metavar="SECONDS", help="between two looks; 2 unless set")
OPTIONS.add_argument("--once", action="store_true", help="print the page once; so does an output that is no terminal")
