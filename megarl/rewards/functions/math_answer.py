r"""Reward 1 if the final expression of a completion is mathematically equal to the ground truth: \frac{1}{2} is 0.5.

It uses the library math-verify, which parses LaTeX and plain expressions and compares them with sympy.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from math_verify import parse, verify
from sympy import Expr, N

from megarl.rewards import register_reward
from megarl.rewards.functions.boxes import BOX, after_reasoning, last_box
from megarl.rewards.functions.math_limits import ProcessorTimeError, final_part, is_small, processor_time
from megarl.rewards.result import ground_truth_of
from megarl.rewards.surroundings import time_limit_s
from megarl.samples.sample import Completion, Prompt

_TINY = 1e-3
_SHARE = 0.4  # of a sample's time, for an answer that takes long; the ground truth is read before

# The library's own timeout uses signal.alarm, which would disarm the pool's timeout of the sample; without it, the
# library logs a warning.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@register_reward("math")
def math_answer(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the two are equal, else 0.0; an answer that cannot be parsed, or takes too long, is wrong."""
    truth = readable(ground_truth_of(prompt))
    # "\frac{1}{2}" is parsed as LaTeX only between dollar signs; a ground truth is always one expression.
    gold = parse(truth if "$" in truth or r"\boxed" in truth else f"${truth}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the ground truth {truth[:100]!r} is no mathematics that can be read")
    part = final_part(readable(after_reasoning(completion.text)))
    if part is None or (BOX.search(part) and last_box(part) is None):  # a box that never ends says nothing
        return 0.0
    try:
        with processor_time(_SHARE * time_limit_s()):
            answer = parse(part, parsing_timeout=None)
            if not all(map(is_small, (*gold, *answer))):  # too large to calculate: equal if written alike
                return float(any(item in gold for item in answer))
            return float(verify(gold, answer, timeout_seconds=None) and not _are_tiny_and_differ(gold[0], answer[0]))
    except ProcessorTimeError:
        return 0.0


def readable(text: str) -> str:
    r"""A text in forms that the library knows: money and percent without their signs, ½ as a fraction.

    >>> readable(r"\boxed {50\%}, \$18.90, 3½")
    '\\boxed{50}, 18.90, 3\\frac{1}{2}'
    """
    for pattern, form in _FORMS:
        text = pattern.sub(form, text)
    return text


def _fraction(found: re.Match[str]) -> str:
    over, under = unicodedata.normalize("NFKC", found[2]).split("\u2044")
    return rf"{found[1]}\frac{{{over}}}{{{under}}}" if found[1] else f"{over}/{under}"


_GAP = r"(?:[ \t~]|\\[,;:! ])*+"  # of text or LaTeX
_FORMS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (BOX, r"\\boxed{"),
    (re.compile(r"\\\$|[€£¥][ \t]?"), ""),
    (re.compile(r"(\d?)([\u00bc-\u00be\u2150-\u215e])"), _fraction),
    (re.compile(rf"(?<=[\d}}]){_GAP}(?:\\?%|(?i:percent|dollars?|cents?|euros?|pounds?|yen)\b)"), ""),
    (re.compile(r"(?<=\d)\.[ \t]*+\}"), "}"),
)


def _are_tiny_and_differ(gold: Any, answer: Any) -> bool:
    """Whether both are numbers so near 0 that the library, which rounds to six decimals, takes them for equal."""
    if not all(isinstance(each, Expr) and each.is_number and each.is_real for each in (gold, answer)):
        return False
    largest = max(abs(N(gold)), abs(N(answer)))
    return bool(0 < largest < _TINY and abs(N(gold - answer)) > _TINY * largest)
