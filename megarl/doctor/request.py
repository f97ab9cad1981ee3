"""The options of `megarl doctor`; all other words are settings."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Request(NamedTuple):
    json: bool = False
    run: Path | None = None  # the folder of a run that is to be explained; None: the machine


def parse(words: list[str]) -> tuple[Request, list[str]]:
    """The options among these words, and the settings.  Raises ValueError, one sentence, for words that are neither."""
    settings: list[str] = []
    run: Path | None = None
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option == "--run":
            folder = value if equals else next(rest, "")
            if not folder:
                raise ValueError("megarl doctor --run: expected the folder of a run, such as runs/quickstart")
            run = Path(folder)
        elif word.startswith("--") and option not in ("--json", "--config"):
            raise ValueError(f"there is no option {option}; expected --json, --run RUN, --config FILE or key=value")
        elif word != "--json":
            settings.append(word)
    if run is not None and settings:
        raise ValueError(f"megarl doctor --run {run} {' '.join(settings)}: the run has its own settings; expected none")
    return Request("--json" in words, run), settings
