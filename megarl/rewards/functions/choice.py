"""Reward 1 if a multiple-choice question is answered with the right letter."""

from __future__ import annotations

import re

from megarl.rewards import register_reward
from megarl.rewards.functions.boxes import BOX, after_reasoning, last_box
from megarl.rewards.result import ground_truth_of
from megarl.samples.sample import Completion, Prompt

# Possessive quantifiers (*+) give nothing back: with several \s* in a row the time would grow with the fourth power of
# the number of spaces in a text.
_OPEN = r"[\s*_\"'({\[]*+"
_LATEX = r"(?:\\(?:text|math)\w*+\{\s*+\(?)?+"
# A small letter where nothing but a mark or the end of the line follows: "the answer is a." but not "a number".
_THINKS = r"(?!I (?i:think|believe|guess|would|say|choose|pick|am)\b)"  # the pronoun
# A small letter where a bracket, a mark or the end of the line follows: "the answer is a." but not "a number".
_LETTER = (
    rf"{_OPEN}{_LATEX}{_THINKS}([A-Z](?![A-Za-z0-9'])|(?<=[(*])[a-z](?=[)*])|[a-z](?=\)|[.:][ \t])|"
    rf"[a-z](?=[)*.,;:\]}}\"']*+[ \t]*+(?:\n|\Z)))"
)
_IN_BOX = re.compile(rf"{_OPEN}{_LATEX}([A-Za-z])(?![A-Za-z0-9'])")
_GOOD = r"(?i:(?:correct|right|best|true)(?: \w++)?|(?:my|final) (?:answer|option|choice))"
_SAYS = rf"(?:(?i:answer)|{_GOOD})"
_IS = r"(?:[\s*_]*+(?i:is|was|would be|must be|should be)\b[\s:*_]*+|[\s*_]*+[:=-][\s:*_]*+)"
_NAMED = r"(?i:the )?+(?i:option|choice|letter|answer)?+:?+"
_ABOUT = r"(?!\W*+(?i:is|was|does|cannot|ignores|would|has|looks|seems|fails)\b)"  # it speaks of the letter
# From the most to the least explicit: the last match in the text of the first pattern that matches.
_PATTERNS = (
    re.compile(rf"####{_LETTER}"),
    re.compile(rf"\b(?:{_SAYS}{_IS}|(?i:i (?:choose|pick|select)|go with)\b[\s:*_]*+|{_GOOD}\s++){_NAMED}{_LETTER}"),
    re.compile(
        r"(?<![A-Za-z0-9'])([A-Z])[)*]*+ (?i:is|must be) (?i:the |clearly )?+(?i:correct|right|best|true|answer)\b"
    ),
    # In front, before an explanation: "B, I am sure."
    re.compile(r"\A\W*+([A-Z])(?:[)\].:,*]|[ \t]*+(?:\n|\Z))"),
    re.compile(r"\A\W*+([a-z])(?:\)|[.:][ \t]|\W*+\Z)"),
    re.compile(rf"(?<!not )\b(?i:option|choice|answer)[\s*_]++\(?([A-Z])(?![A-Za-z0-9']){_ABOUT}"),
    # Not the article, and not the pronoun.
    re.compile(r"(?<![A-Za-z0-9'])(?<!not )(?<!not \()(?![AI] [a-z])([A-Z])(?![A-Za-z0-9'])"),
)
_TRUTH = re.compile(r"\W*+([A-Za-z])(?:[)\].:].*|\W*+)", re.DOTALL)  # B, (b), B) Paris


@register_reward("choice")
def choice(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the letter that the completion chooses is the ground truth's, else 0.0."""
    truth = ground_truth_of(prompt)
    letter = _TRUTH.fullmatch(truth)
    if letter is None:
        raise ValueError(
            f"the ground truth {truth[:100]!r} is no letter of a choice; expected one, such as B or B) Paris"
        )
    return float(chosen_letter(completion.text) == letter[1].upper())


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
