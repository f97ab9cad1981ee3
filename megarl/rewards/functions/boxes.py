r"""Finds the answer in what a model generated: what follows its reasoning, and what it puts into \boxed{...}."""

from __future__ import annotations

import re

BOX = re.compile(r"\\f?box(?:ed)?[ \t]*+\{")


def last_box(text: str, box: re.Pattern[str] = BOX) -> str | None:
    r"""The content of the last box; None without one, and if the last one never ends.

    >>> last_box(r"\boxed{1}, \boxed{\frac{1}{2}}."), last_box(r"\fbox{46} of 50"), last_box(r"\boxed{4} or \boxed{5")
    ('\\frac{1}{2}', '46', None)
    """
    ends = [found.end() for found in box.finditer(text)]
    depth = 1
    for at in range(ends[-1] if ends else len(text), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[ends[-1] : at]
    return None


def without_reasoning(text: str) -> str:
    """What follows the last </think>; nothing if a <think> never ends, as the answer is not there."""
    answer = text.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


def after_reasoning(text: str) -> str:
    """The answer without its reasoning, with a plain minus.

    >>> after_reasoning("<think>Is it 4?</think> It is \u22125."), after_reasoning("<think>It may be 4")
    (' It is -5.', '')
    """
    return without_reasoning(text).replace("\u2212", "-")
