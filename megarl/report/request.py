"""The command line of `megarl report`, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megarl.options import Options, folder


class Request(NamedTuple):
    run: Path
    against: Path | None


def parse(words: Sequence[str]) -> Request:
    """Raises ValueError, one sentence, for words that are no request."""
    return Request(**OPTIONS.values(words))


OPTIONS = Options(
    "report",
    """Writes report.html into a run's folder: one page that needs no network and no server. Every run of `megarl train`
and `megarl sft` writes it at its end; a run that goes on can be looked at too.""",
    ["megarl report runs/quickstart", "megarl report runs/quickstart --against runs/quickstart_again"],
)
OPTIONS.add_argument("run", type=folder, help="the folder of a run, such as runs/quickstart")
OPTIONS.add_argument("--against", type=folder, metavar="RUN", help="another run, beside whose curves these are drawn")
