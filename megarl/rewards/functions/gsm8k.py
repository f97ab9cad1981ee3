"""Reward 1 if the final number of a completion is the ground truth.

Grade-school mathematics (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168) marks the answer with `####`.
`gsm8k` also accepts answers without the mark; `gsm8k_strict` requires the mark, as published runs of PPO on this data
set do.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from megarl.rewards import register_reward
from megarl.rewards.functions.boxes import BOX, after_reasoning, last_box
from megarl.rewards.result import ground_truth_of
from megarl.samples.sample import Completion, Prompt

# A sign belongs to a number unless it joins two of them, as in 2-3.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?[$€£¥]?(?:\d++[ ]\d++/\d++(?![/\d])|"
    r"(?:(?:\d{1,3}(?:,\d{2,3})++(?!\d)|\d++)(?:\.\d++)?|(?<!\d)\.\d++)(?:e[-+]?\d++)?(?:/\d++)?)"
)
_MONEY = dict.fromkeys(map(ord, ",$€£¥"))
_DIGITS = 1000  # of a power of ten: no person writes more
_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_MIXED = re.compile(r"(?<=\d)[ \t]*+(?=\\[dt]?frac\{\d)")  # between a number and the fraction behind it
_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|\\[,! ]|,\\!|[\u00a0\u2009\u202f])(?=\d)")  # of thousands, in LaTeX or print
_VULGAR = re.compile("(\\d?)([\u00bc-\u00be\u2150-\u215e])")  # such as one half in one character
_SPACED = re.compile(r"(?<![\d.,/])\d{1,3}(?: \d{3})++(?![\d/])")  # 1 000: where a number stands alone
_LONE_SIGN = re.compile(r"((?:####|\{)[ \t*]*+[-+])[ \t]++(?=[\d$.])")  # "#### - 5"
# What may stand behind the number of a ground truth: a unit, but no word of scale and nothing to calculate.
_UNIT = re.compile(
    r"(?!.*\b(?i:dozens?|hundreds?|thousands?|[mbtr]+illions?|pi)\b)(?:\\(?:[%$ ,!;]|text\w*|mathrm|circ\b)|"
    r"\^\{?(?:[23]|(?=\\circ))\}?|(?<=[^\W\d])[/-](?=[^\W\d])|[^\W\d_π]|[ \t%°.$€£¥²³(){}*])*+"
)


@register_reward("gsm8k")
def gsm8k(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the answer is right: the number after the last `####`, else in the last \\boxed{}, else the last one."""
    truth, answer = _truth(prompt), final_number(completion.text)
    return float(answer is not None and _value(answer) == truth)


@register_reward("gsm8k_strict")
def gsm8k_strict(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the number after the last `####` is right; an answer without the mark is wrong."""
    truth, answer = _truth(prompt), marked_number(completion.text)
    return float(answer is not None and _value(answer) == truth)


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
        return Decimal(text.strip().translate(_MONEY).rstrip("%").rstrip("."))
    except InvalidOperation:
        return None


def number_of(truth: str) -> Fraction | None:
    """The number that a ground truth is, in the end and with a unit at most; None if it is none.

    >>> number_of("3 1/2 cups"), number_of("12 + 34 = 46\\n#### 46"), number_of("2 or 3")
    (Fraction(7, 2), Fraction(46, 1), None)
    """
    plain = _plain(truth)
    _, mark, behind = plain.rpartition("####")
    part = behind if mark else last_box(plain) or plain
    part = _SPACED.sub(_joined, part.rpartition("=")[2].strip(" \t\n*$€£¥\\"))
    part = re.sub(r"\A([-+])\s+", r"\1", part)
    found = _NUMBER.match(part)
    return _value(found[0]) if found and _UNIT.fullmatch(part, found.end()) else None


def _truth(prompt: Prompt) -> Fraction:
    """Raises ValueError for a ground truth that no answer could equal."""
    truth = ground_truth_of(prompt)
    if (number := number_of(truth)) is None:
        raise ValueError(f"the ground truth {truth[:100]!r} is no number; expected one, such as 46, 1,000 or 3 1/2")
    return number


def _value(text: str) -> Fraction | None:
    """42, 42.0, 84/2 and $42 are the same; 3 1/2 is 7/2."""
    whole, _, part = text.rpartition(" ")
    if whole:
        more, number = _value(part), _value(whole)
        return None if more is None or number is None else number + (-more if whole.startswith("-") else more)
    over, _, under = text.partition("/")
    found = [part for part in (to_decimal(over), to_decimal(under or "1")) if part is not None]
    if len(found) < 2 or not found[1] or any(not p.is_finite() or abs(p.adjusted()) > _DIGITS for p in found):
        return None
    return Fraction(found[0]) / Fraction(found[1])


def _plain(text: str) -> str:
    """The answer, with fractions and thousands as people type them."""
    text = _MIXED.sub(" ", _VULGAR.sub(_in_latex, after_reasoning(text)))
    text = _FRACTION.sub(r"\1/\2", text)
    return _LONE_SIGN.sub(r"\1", _SEPARATOR.sub("", text))


def _in_latex(found: re.Match[str]) -> str:
    over, under = unicodedata.normalize("NFKC", found[2]).split("\u2044")
    return rf"{found[1]}\frac{{{over}}}{{{under}}}"


def _joined(found: re.Match[str]) -> str:
    return found[0].replace(" ", "")


def _first(part: str | None) -> str | None:
    """The first number of a part, behind its last "=" if there is one."""
    numbers = _NUMBER.findall(_SPACED.sub(_joined, (part or "").rpartition("=")[2]))
    return str(numbers[0]) if numbers else None


def _after_mark(text: str) -> str | None:
    """The rest of the line after the last mark, or the next line that is not empty."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] if mark else None
