"""Reward 1 if the final number of a completion is the ground truth.

Grade-school mathematics (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168) marks the answer with `####`.
`gsm8k` also accepts answers without the mark; `gsm8k_strict` requires the mark, as published runs of PPO on this data
set do.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from megarl.rewards import register_reward
from megarl.rewards.functions.boxes import BOX, after_reasoning, last_box
from megarl.rewards.result import ground_truth_of
from megarl.sample import Completion, Prompt

# A sign belongs to a number unless it joins two of them, as in 2-3.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?\$?(?:(?:\d{1,3}(?:,\d{2,3})++(?!\d)|\d++)(?:\.\d++)?|(?<!\d)\.\d++)(?:e[-+]?\d++)?(?:/\d++)?"
)
_DIGITS = 1000  # of a power of ten: no person writes more
_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|\\[,!]|,\\!)(?=\d)")  # of thousands, in LaTeX


@register_reward("gsm8k")
def gsm8k(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the answer is right: the number after the last `####`, else in the last \\boxed{}, else the last one."""
    truth, answer = ground_truth_of(prompt), final_number(completion.text)
    return float(answer is not None and _same(answer, truth))


@register_reward("gsm8k_strict")
def gsm8k_strict(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the number after the last `####` is right; an answer without the mark is wrong."""
    truth, answer = ground_truth_of(prompt), marked_number(completion.text)
    return float(answer is not None and _same(answer, truth))


def final_number(text: str) -> str | None:
    """The answer that `gsm8k` reads; None without a number, and for a text that is cut off in a box or in thoughts."""
    answer = _plain(text)
    if number := _first(_after_mark(answer)):
        return number
    if BOX.search(answer):
        return _first(last_box(answer))
    numbers = _NUMBER.findall(answer)
    return str(numbers[-1]) if numbers else None


def marked_number(text: str) -> str | None:
    """The answer that `gsm8k_strict` reads; None without one after the mark."""
    return _first(_after_mark(_plain(text)))


def to_decimal(text: str) -> Decimal | None:
    """A number as people write it: commas, $ and % are removed; None if the text is no number.

    >>> to_decimal(" $1,234.50 ")
    Decimal('1234.50')
    """
    try:
        return Decimal(text.strip().replace(",", "").replace("$", "").rstrip("%").rstrip("."))
    except InvalidOperation:
        return None


def _same(answer: str, ground_truth: str) -> bool:
    """Equal as numbers: 42, 42.0, 84/2 and $42 are the same answer."""
    number = _value(answer)
    return number is not None and number == _value(_plain(ground_truth))


def _value(text: str) -> Fraction | None:
    over, _, under = text.partition("/")
    found = [part for part in (to_decimal(over), to_decimal(under or "1")) if part is not None]
    if len(found) < 2 or not found[1] or any(not p.is_finite() or abs(p.adjusted()) > _DIGITS for p in found):
        return None
    return Fraction(found[0]) / Fraction(found[1])


def _plain(text: str) -> str:
    """The answer, with fractions and thousands as people type them."""
    return _SEPARATOR.sub("", _FRACTION.sub(r"\1/\2", after_reasoning(text)))


def _first(part: str | None) -> str | None:
    """The first number of a part, behind its last "=" if there is one."""
    numbers = _NUMBER.findall((part or "").rpartition("=")[2])
    return str(numbers[0]) if numbers else None


def _after_mark(text: str) -> str | None:
    """The rest of the line after the last mark, or the next line that is not empty."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] if mark else None
