"""The command line of `megarl watch`, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megarl.options import Options, folder, positive


class Request(NamedTuple):
    run: Path
    every: float  # seconds between two looks
    once: bool  # one page, as for a file or a mail


def parse(words: Sequence[str]) -> Request:
    """Raises ValueError, one sentence, for words that are no request."""
    return Request(**OPTIONS.values(words))


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
