"""The Consoles of rich that this package prints with: they print text as it is.

rich takes `[text]` for markup and, even without markup, `:fire:` for an emoji.  The name of a function stands behind a
colon in our sentences, as in `my_reward.py:fire: it takes ...`; so all Consoles are made here, without emoji.
"""

from __future__ import annotations

from rich.console import Console


def sentences(*, stderr: bool = False) -> Console:
    """For text that a reader copies: no line is broken at the terminal's width, nothing is coloured."""
    return Console(stderr=stderr, soft_wrap=True, markup=False, highlight=False, emoji=False)


def pages(*, stderr: bool = False, markup: bool = False) -> Console:
    """For tables and pages, which fit the terminal's width.

    `markup`: "[bold]text[/]" is bold; so text of others has to be escaped.
    """
    return Console(stderr=stderr, markup=markup, highlight=False, emoji=False)
