"""The options of `megarl doctor`; all other words are settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megarl.doctor.link import Place, place_of
from megarl.options import Options, folder


class Request(NamedTuple):
    json: bool
    run: Path | None  # the folder of a run that is to be explained; None: the machine
    listen: Place | None  # where peers measure the network to this machine
    peer: Place | None  # to which the network is measured


def parse(words: Sequence[str]) -> tuple[Request, list[str]]:
    """The options among these words, and the settings.  Raises ValueError, one sentence, for words that are neither."""
    given, settings = OPTIONS.values_and_settings(words)
    request = Request(**given)
    others = [f"--{option}" for option in ("run", "listen", "peer") if given[option] is not None] + settings[:1]
    if request.listen and request.json:
        others.append("--json")
    if len(others) > 1 and (request.run or request.listen):
        OPTIONS.error(f"{others[0]} and {others[1]} exclude each other")
    return request, settings


OPTIONS = Options("doctor", "", [])  # its page is that of a command with settings
OPTIONS.add_argument("--json", action="store_true")
OPTIONS.add_argument("--run", type=folder)
OPTIONS.add_argument("--listen", type=place_of, metavar="ADDRESS:PORT")
OPTIONS.add_argument("--peer", type=place_of, metavar="ADDRESS:PORT")
