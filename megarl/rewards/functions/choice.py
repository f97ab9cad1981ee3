"""Reward 1 if a multiple-choice question is answered with the right letter."""

from __future__ import annotations

import re

from megarl.rewards import register_reward
from megarl.rewards.result import ground_truth_of
from megarl.sample import Completion, Prompt

# From the most to the least explicit: the first pattern that matches is used, and its last match in the text.
# Possessive quantifiers (*+) give nothing back: with several \s* in a row the time would grow with the fourth power of
# the number of spaces in a text.
_PATTERNS = (
    re.compile(r"\\boxed\{\s*+(?:\\text\{)?+\s*+\(?([A-Z])\)?\s*+\}"),
    re.compile(r"####\s*+\(?([A-Z])\b"),
    re.compile(r"(?i:answer|option|choice)\s*+(?i:is)?+\s*+:?+\s*+\**+\s*+\(?([A-Z])\b"),
    re.compile(r"(?<![A-Za-z0-9'])\(?([A-Z])\)?(?![A-Za-z0-9'])"),
)


@register_reward("choice")
def choice(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the letter that the completion chooses is the ground truth's, else 0.0."""
    return float(chosen_letter(completion.text) == ground_truth_of(prompt).strip().strip("().").upper())


def chosen_letter(text: str) -> str | None:
    r"""The letter in \boxed{}, after ####, after "answer is", else the last single capital letter; None without any.

    >>> chosen_letter("A is too small, so the answer is (B).")
    'B'
    """
    for pattern in _PATTERNS:
        letters = pattern.findall(text)
        if letters:
            return str(letters[-1])
    return None
