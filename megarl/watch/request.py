"""The command line of `megarl watch RUN`, and its help, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich.console import Console


class Request(NamedTuple):
    run: Path
    every_s: float = 2.0  # between two looks
    once: bool = False  # one page, as for a file or a mail


def parse(words: list[str]) -> Request:
    """Raises ValueError, one sentence, for words that are no request."""
    folders: list[Path] = []
    every_s, once = Request._field_defaults["every_s"], False
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option == "--every":
            every_s = _seconds(value if equals else next(rest, ""))
        elif word == "--once":
            once = True
        elif word.startswith("-"):
            raise ValueError(f"there is no option {option}; expected --every SECONDS, --once, --debug or --help")
        else:
            folders.append(Path(word))
    if len(folders) != 1:
        raise ValueError(
            f"{' '.join(['megarl', 'watch', *words])}: expected the folder of one run, such as runs/quickstart"
        )
    return Request(folders[0], every_s, once)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise ValueError(f"megarl watch --every {text}: expected seconds, 0.1 to 3600")
    return seconds


def print_help(console: Console) -> None:
    """The page of `megarl watch --help`."""
    console.print("[bold]megarl watch[/] RUN \\[--every SECONDS] \\[--once]\n", highlight=False)
    for line in HELP:
        console.print(line, highlight=False, markup=False)


HELP = (
    "Shows what the run in the folder RUN is doing, until it ends: stage, time to its end, curves, stages of the last",
    "step and its slowest ranks, servers, last samples, advice and faults.  It reads the folder's files alone, so it",
    "works on any machine that sees them.  Ctrl-C ends the page, not the run.",
    "",
    "--every SECONDS   between two looks; 2 unless set",
    "--once            print the page once; so does an output that is no terminal",
    "",
    "megarl watch runs/quickstart",
    "ssh node-0 megarl watch /shared/runs/big --once",
)
