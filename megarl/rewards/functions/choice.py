"""Reward 1 if a multiple-choice question is answered with the right letter."""

from __future__ import annotations

import re

from megarl.rewards import register_reward
from megarl.rewards.functions.boxes import BOX, after_reasoning, last_box
from megarl.rewards.result import ground_truth_of
from megarl.sample import Completion, Prompt

# Possessive quantifiers (*+) give nothing back: with several \s* in a row the time would grow with the fourth power of
# the number of spaces in a text.
_OPEN = r"[\s*_\"'({\[]*+"
_LETTER = rf"{_OPEN}(?:\\(?:text|math)\w*+\{{\s*+\(?)?+([A-Z](?![A-Za-z0-9'])|(?<=[(*])[a-z](?=[)*]))"
_IN_BOX = re.compile(rf"{_OPEN}(?:\\(?:text|math)\w*+\{{\s*+\(?)?+([A-Za-z])(?![A-Za-z0-9'])")
_SAYS = r"(?i:answer|(?:correct|right|best|my) (?:option|choice|one)|i (?:choose|pick|select)|go with)"
_IS = r"(?i:is|was|would be|must be|should be)?+[\s:*_]*+(?i:the )?+(?i:option|choice|letter)?+:?+"
# From the most to the least explicit: the last match in the text of the first pattern that matches.
_PATTERNS = (
    re.compile(rf"####{_LETTER}"),
    re.compile(rf"\b{_SAYS}[\s:*_]*+{_IS}{_LETTER}"),
    re.compile(r"\A\W*+([A-Z])(?:[)\].:,*]|\s*+$)"),  # "B, I am sure."
    re.compile(r"\b(?i:option|choice)\s++\(?([A-Z])(?![A-Za-z0-9'])(?!\)?\s*+(?i:is|was|does|cannot|ignores)\b)"),
    # Not the article, and not the pronoun.
    re.compile(r"(?<![A-Za-z0-9'])(?![AI] [a-z])([A-Z])(?![A-Za-z0-9'])"),
)


@register_reward("choice")
def choice(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the letter that the completion chooses is the ground truth's, else 0.0."""
    return float(chosen_letter(completion.text) == ground_truth_of(prompt).strip().strip("().").upper())


def chosen_letter(text: str) -> str | None:
    r"""The letter in the last box, after ####, after "answer is", in front, else the last single one; None without any.

    >>> chosen_letter("A is too small, so the answer is (B). Option C is too large.")
    'B'
    """
    answer = after_reasoning(text)
    if BOX.search(answer):
        found = _IN_BOX.match(last_box(answer) or "")
        return found[1].upper() if found else None
    for pattern in _PATTERNS:
        letters = pattern.findall(answer)
        if letters:
            return str(letters[-1]).upper()
    return None
