r"""What keeps the reward `math` from reading or calculating without end, whatever a completion says.

The library searches a text in a time that grows with a high power of its length, parses nested brackets in a time that
doubles with every level, and calculates 9^{9^{9}}.  So it gets a short piece of the completion with few levels of
brackets, calculates no numbers of more than 10,000 digits, and has a share of the sample's processor time for the rest.
"""

from __future__ import annotations

import math
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import FrameType

from sympy import Add, Basic, MatrixBase, Mul, Number, Pow, Product, binomial, factorial

_LONGEST = 1000  # characters; with 50 boxes in them, the library's search takes half a second
_BOXES = 20
_DEEPEST = 10  # levels of brackets; 12 take the library's parser a second
_DIGITS = 10_000

_SPACES = re.compile(r"\s+")
_LEVELS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


class ProcessorTimeError(BaseException):
    """Not an Exception: the library and sympy catch those."""


def final_part(text: str) -> str | None:
    r"""The last thousand characters, or those around the last \boxed, from the start of a line if one starts there.

    A run of spaces is one space.  None for a part with more brackets or boxes than a person writes.
    """
    text = _SPACES.sub(lambda run: "\n" if "\n" in run[0] else " ", text)
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    end = len(text) if box < 0 else min(len(text), box + _LONGEST // 2)
    begin = max(0, end - _LONGEST)
    if begin:
        begin = text.find("\n", begin, end if box < 0 else box) + 1 or begin
    part = text[begin:end]
    levels = accumulate((_LEVELS.get(character, 0) for character in part), lambda level, step: max(0, level + step))
    few = max(levels, default=0) <= _DEEPEST and part.count("\\boxed") <= _BOXES
    return part if few else None


def is_small(expression: object) -> bool:
    """Whether no number that the expression comes to, or meets on the way, has more than 10,000 digits."""
    try:
        return _digits(expression) <= _DIGITS
    except RecursionError:  # the library compares such a tree by recursion too
        return False


@contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Raises ProcessorTimeError in the body when it has used so many seconds of the processor.

    Not in other threads than the main one, which get no signals; rewards run in the main thread of their process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    running = True

    def stop(signum: int, frame: FrameType | None) -> None:
        if running:
            raise ProcessorTimeError

    before = signal.signal(signal.SIGPROF, stop)
    try:
        # Again every tenth of a second: the first exception may be lost, for example in a destructor.
        signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)
        yield
    finally:
        running = False  # before the timer: a signal that is already pending must have no effect
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _digits(node: object) -> float:
    """An upper bound of the decimal logarithm of a number, and of those below it in the tree."""
    if isinstance(node, Number):
        return math.log10(max(1, abs(node.p), node.q)) if node.is_Rational else 1.0
    parts = node.flat() if isinstance(node, MatrixBase) else node.args if isinstance(node, Basic) else ()
    digits = [_digits(part) for part in parts]
    if isinstance(node, Add):
        return max(digits) + math.log10(len(digits))
    if isinstance(node, Mul):
        return sum(digits)
    if isinstance(node, Pow):
        return max(digits[0] * _ten_to(digits[1]), *digits)
    if isinstance(node, (factorial, binomial, Product)):
        return _ten_to(max(digits)) * max(digits)
    return max(digits, default=0.0)


def _ten_to(digits: float) -> float:
    return 10.0 ** min(digits, 300.0)
