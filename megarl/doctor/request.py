"""The options of `megarl doctor`; all other words are settings."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from megarl.doctor.link import Place, place_of

_WITH_VALUE = {
    "--run": "the folder of a run, such as runs/quickstart",
    "--listen": "ADDRESS:PORT of this machine, such as 10.0.0.1:29400",
    "--peer": "ADDRESS:PORT of a machine where `megarl doctor --listen` waits, such as 10.0.0.1:29400",
}


class Request(NamedTuple):
    json: bool = False
    run: Path | None = None  # the folder of a run that is to be explained; None: the machine
    listen: Place | None = None  # where peers measure the network to this machine
    peer: Place | None = None  # to which the network is measured


def _json_beside(alone: str, words: list[str]) -> list[str]:
    """What explains a run may print JSON; what listens prints lines."""
    return [word for word in words if word == "--json" and alone == "--listen"]


def parse(words: list[str]) -> tuple[Request, list[str]]:
    """The options among these words, and the settings.  Raises ValueError, one sentence, for words that are neither."""
    settings: list[str] = []
    values: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option in _WITH_VALUE:
            values[option] = value if equals else next(rest, "")
            if not values[option]:
                raise ValueError(f"megarl doctor {option}: expected {_WITH_VALUE[option]}")
        elif word.startswith("--") and option not in ("--json", "--config"):
            options = "--json, --run RUN, --listen ADDRESS:PORT, --peer ADDRESS:PORT, --config FILE"
            raise ValueError(f"there is no option {option}; expected {options} or key=value")
        elif word != "--json":
            settings.append(word)
    for alone, why in (("--run", "the run has its own settings"), ("--listen", "it only answers")):
        if alone in values and (others := [*(o for o in values if o != alone), *settings, *_json_beside(alone, words)]):
            raise ValueError(f"megarl doctor {alone} {values[alone]} {' '.join(others)}: {why}; expected nothing else")
    listen, peer = (place_of(values[o], o) if o in values else None for o in ("--listen", "--peer"))
    return Request("--json" in words, Path(values["--run"]) if "--run" in values else None, listen, peer), settings
