"""The options of the commands that read words of their own in place of a configuration, by argparse."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

from rich.console import Console

CONFIG, NAME, FOLDER = "--config", "--config-name", "--config-path"  # options of a command's settings


class Options(argparse.ArgumentParser):
    """`key=value` is `--key value` where the command has that option.  Each mistake is a ValueError of one sentence.

    Example: options = Options("watch", "Shows a run.", ["megarl watch runs/mine"]); options.add_argument("run")
    """

    def __init__(self, command: str, about: str, examples: Sequence[str], *, usage: str | None = None) -> None:
        super().__init__(
            prog=f"megarl {command}",
            usage=usage,
            description=about,
            epilog="\n".join(examples),
            add_help=False,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def values(self, words: Sequence[str]) -> dict[str, Any]:
        """What each argument comes to."""
        return vars(self.parse_args(list(self._options(words))))

    def values_and_settings(self, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """What each option comes to, and all other words as settings."""
        given, settings = self.parse_known_args(list(words))
        if unknown := [
            word for word in settings if word.startswith("--") and word.partition("=")[0] not in (CONFIG, NAME, FOLDER)
        ]:
            self.error(f"there is no option {unknown[0]}")
        return vars(given), settings_of(settings)

    def show(self, console: Console) -> None:
        """Print the page of the command."""
        console.print(self.format_help(), highlight=False, markup=False, soft_wrap=True, end="")

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        raise ValueError(f"{self.prog}: {message}" + ("" if "expected" in message else f"; expected {usage}"))

    def _options(self, words: Sequence[str]) -> Iterator[str]:
        given: dict[str, str] = {}
        for word in words:
            option = word if word.startswith("--") else f"--{word}"
            name = option.partition("=")[0]
            if name not in self._option_string_actions or (name == option and option is not word):
                yield word
                continue
            if name in given and not isinstance(self._option_string_actions[name], argparse._ExtendAction):
                self.error(f"{word}: it was given before, as {given[name]}")
            given[name] = word
            yield option


def settings_of(words: Sequence[str]) -> list[str]:
    """Replace `--config FILE` and `--config=FILE` by `recipe=FILE`, and write `--option value` of verl as one word."""
    out: list[str] = []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option not in (CONFIG, NAME, FOLDER):
            out.append(word)
            continue
        value = value if equals else next(rest, "")
        if option != CONFIG:
            out.append(f"{option}={value}")
            continue
        if not value.endswith((".yaml", ".yml")):
            raise ValueError(f"--config {value}: expected the path of a YAML file")
        quoted = value.replace("'", "\\'")
        out.append(f"recipe='{quoted}'")
    return out


def folder(text: str) -> Path:
    """A type of arguments."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: expected a folder")
    return Path(text)


def number(text: str) -> int:
    """A type of arguments: a whole number."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number")
    return int(text)


def count(text: str) -> int:
    """A type of arguments: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def positive(text: str) -> float:
    """A type of arguments: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return value


class Place(NamedTuple):
    """An address and a port, as in 10.0.0.1:29400 or [fd00::1]:29400."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def place_of(text: str) -> Place:
    """A type of arguments: ADDRESS:PORT."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # as sockets do with a name
    except ValueError:
        host = port = None
    if not host or port is None or parts.netloc != text or "@" in text:
        raise argparse.ArgumentTypeError(f"{text}: expected ADDRESS:PORT, such as 10.0.0.1:29400")
    return Place(host, port)
