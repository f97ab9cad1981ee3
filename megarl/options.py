"""The options of the commands that read words of their own in place of a configuration, by argparse."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

FILES = ("--config", "--config-name", "--config-path")  # options of a command's settings


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
        """What each option comes to, and all other words, which are settings."""
        given, settings = self.parse_known_args(list(words))
        if unknown := [word for word in settings if word.startswith("--") and word.partition("=")[0] not in FILES]:
            self.error(f"there is no option {unknown[0]}")
        return vars(given), settings

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
            if name in given:
                self.error(f"{word}: it was given before, as {given[name]}")
            given[name] = word
            yield option


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
