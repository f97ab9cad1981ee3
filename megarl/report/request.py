"""The command line of `megarl report RUN [--against RUN2]`, and its help, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich.console import Console


class Request(NamedTuple):
    run: Path
    against: Path | None = None


def parse(words: list[str]) -> Request:
    """Raises ValueError, one sentence, for words that are no request."""
    folders: list[Path] = []
    against: Path | None = None
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option == "--against":
            other = value if equals else next(rest, "")
            if not other:
                raise ValueError("megarl report --against: expected the folder of another run")
            against = Path(other)
        elif word.startswith("-"):
            raise ValueError(f"there is no option {option}; expected --against RUN, --debug or --help")
        else:
            folders.append(Path(word))
    if len(folders) != 1:
        raise ValueError(
            f"{' '.join(['megarl', 'report', *words])}: expected the folder of one run, such as runs/quickstart"
        )
    return Request(folders[0], against)


def print_help(console: Console) -> None:
    """The page of `megarl report --help`."""
    console.print("[bold]megarl report[/] RUN \\[--against RUN2]\n", highlight=False)
    for line in HELP:
        console.print(line, highlight=False, markup=False)


HELP = (
    "Writes report.html into the folder RUN: one page that needs no network and no server.",
    "Every run of `megarl train` and `megarl sft` writes it at its end; a run that goes on can be looked at too.",
    "",
    "--against RUN2   the curves and settings of another run beside those of this one",
    "",
    "megarl report runs/quickstart",
    "megarl report runs/quickstart --against runs/quickstart_again",
)
