"""What this package prints: text as it is, and none of it is obeyed by a terminal.

rich takes `[text]` for markup and, even without markup, `:fire:` for an emoji.  The name of a function stands behind a
colon in our sentences, as in `my_reward.py:fire: it takes ...`; so all Consoles are made here, without emoji.

Rows, answers, rewards and files of others are in our sentences, too.  A character that would move the cursor, set a
colour or a title, or turn the direction of writing is a space here; and a new line of such a text begins no line of its
own that looks like one of ours.
"""

from __future__ import annotations

import io
import locale
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with spaces in place of characters that a terminal obeys, but for the new lines."""
    return _OBEYED.sub(" ", text)


def one_line(text: object) -> str:
    """Text of a row, a model or a reward, for a line of ours."""
    return printable(str(text)).replace("\n", " ").strip()


def indented(text: object) -> str:
    """Text whose further lines, if it has any, are set in: an error with the end of a log."""
    first, *more = printable(str(text)).split("\n")
    return "".join([first, *(f"\n    {line.rstrip()}" for line in more if line.strip())])


class _Plain(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def sentences(*, stderr: bool = False) -> Console:
    """For text that a reader copies: no line is broken at the terminal's width, nothing is coloured."""
    return _Plain(stderr=stderr, soft_wrap=True, markup=False, highlight=False, emoji=False)


def pages(*, stderr: bool = False, markup: bool = False) -> Console:
    """For tables and pages, which fit the terminal's width.

    `markup`: "[bold]text[/]" is bold; so text of others has to be escaped.
    """
    return _Plain(stderr=stderr, markup=markup, highlight=False, emoji=False)


def say(*lines: object, stderr: bool = True) -> None:
    """Print lines, beside the results of a command or among them; see `indented`.

    Beside them, a terminal that is gone, or a full disk with the log of a run, takes none, and the run goes on.
    """
    with suppress(*[OSError] if stderr else []):
        for line in lines:
            sentences(stderr=stderr).print(indented(line))


class _Record(logging.LogRecord):
    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        if self.exc_info and self.exc_info[0]:
            self.exc_text = _trace(*self.exc_info)  # which a handler takes as it is

    def getMessage(self) -> str:
        return indented(super().getMessage())


def _trace(*error: Any) -> str:
    return indented("".join(traceback.format_exception(*error)))


def own_process() -> None:
    """Let all else that this process prints be such text, and no character that a console cannot show end it.

    Files are in UTF-8 whatever the console is: with another encoding the process begins again, in Python's UTF-8 mode.
    """
    if not sys.flags.utf8_mode and locale.getencoding().lower() not in ("utf-8", "utf8"):
        console = getattr(sys.stdout, "encoding", "ascii")  # there may be none
        variables = {"PYTHONUTF8": "1", "PYTHONIOENCODING": f"{console}:backslashreplace"}
        os.execve(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]], {**os.environ, **variables})
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.setLogRecordFactory(_Record)
    write = warnings.formatwarning
    warnings.formatwarning = lambda message, *where, **more: write(indented(message), *where, **more)
    sys.excepthook = lambda *error: sys.stderr.write(_trace(*error) + "\n")
