"""Reward 1 if the final number of a completion is the ground truth.

Grade-school mathematics (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168) marks the answer with `####`.
`gsm8k` also accepts answers without the mark; `gsm8k_strict` requires the mark, as published runs of PPO on this data
set do.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from megarl.rewards import register_reward
from megarl.rewards.result import ground_truth_of
from megarl.sample import Completion, Prompt

_NUMBER = re.compile(r"[-+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


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
    """The answer that `gsm8k` reads; None for a text without a number."""
    for part in (_after_mark(text), _boxed(text), text):
        numbers = _NUMBER.findall(part or "")
        if numbers:
            return str(numbers[-1] if part is text else numbers[0])
    return None


def marked_number(text: str) -> str | None:
    """The answer that `gsm8k_strict` reads; None without one after the mark."""
    numbers = _NUMBER.findall(_after_mark(text) or "")
    return str(numbers[0]) if numbers else None


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
    """Equal as numbers: 42, 42.0 and $42 are the same answer."""
    number = to_decimal(answer)
    return number is not None and number == to_decimal(ground_truth)


def _after_mark(text: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    return rest if mark else None


def _boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}."""
    _, mark, rest = text.rpartition(r"\boxed{")
    return rest.partition("}")[0] if mark else None
