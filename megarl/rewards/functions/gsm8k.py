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
    text, truth = completion.text, ground_truth_of(prompt)
    for part in (_after_mark(text), _boxed(text), text):
        if part is not None:
            numbers = _NUMBER.findall(part)
            if numbers:
                answer = numbers[-1] if part is text else numbers[0]
                return float(_same(answer, truth))
    return 0.0


@register_reward("gsm8k_strict")
def gsm8k_strict(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the number after the last `####` is right; an answer without the mark is wrong."""
    truth = ground_truth_of(prompt)
    numbers = _NUMBER.findall(_after_mark(completion.text) or "")
    return float(bool(numbers) and _same(numbers[0], truth))


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
