"""`megarl watch RUN`: draws the page, again and again until the run ends."""

from __future__ import annotations

import time
from contextlib import suppress

from rich.live import Live

from megarl.terminal import pages
from megarl.trainer.owner import has_owner
from megarl.watch.follow import Run
from megarl.watch.page import page
from megarl.watch.request import Request

FILE_WIDTH = 160  # of a page that goes to a file


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
