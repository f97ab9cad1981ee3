r"""The numbers of verl 0.9.1 for its own data sources, where they are not those of `gsm8k` and `math`.

`gsm8k_verl` and `math_verl` compare texts, so that 18.0 is not 18; `math_dapo` is in a file of its own.
"""

from __future__ import annotations

import re

from megarl.rewards import register_reward
from megarl.rewards.functions.boxes import last_box
from megarl.rewards.result import ground_truth_of
from megarl.sample import Completion, Prompt

_LAST = 300  # characters of an answer in which verl looks for the mark
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_BOXED = re.compile(r"\A\\boxed\{")
_SPACE = r"\boxed "  # with it verl reads up to a dollar, and no other box

# What is replaced before two expressions are compared, in this order; as in the evaluation of Hendrycks et al. 2021,
# https://arxiv.org/abs/2103.03874.
_BEFORE_UNITS = {"\n": "", r"\!": "", r"\\": "\\", "tfrac": "frac", "dfrac": "frac", r"\left": "", r"\right": ""}
_BEFORE_UNITS |= {r"^{\circ}": "", r"^\circ": "", r"\$": ""}
_AFTER_UNITS = {r"\\%": "", r"\%": "", " .": " 0.", "{.": "{0."}
_UNIT = r"\text{ "


@register_reward("gsm8k_verl")
def gsm8k_verl(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the digits after the last "#### " of the last 300 characters are the ground truth, else 0.0."""
    truth, found = ground_truth_of(prompt), _MARKED.findall(completion.text[-_LAST:])
    return float(bool(found) and found[-1].replace(",", "") == truth)


@register_reward("math_verl")
def math_verl(prompt: Prompt, completion: Completion) -> float:
    r"""1.0 if the last \boxed{} is written as the ground truth, but for spaces, units and forms of fractions."""
    truth, text = ground_truth_of(prompt), completion.text
    answer = last_box(text[text.rfind(r"\boxed") :], _BOXED)
    if _SPACE in text:
        answer = text.rpartition(_SPACE)[2].partition("$")[0]
    if answer is None:
        return 0.0
    try:
        return float(_rewritten(answer) == _rewritten(truth))
    except (IndexError, ValueError):  # a command at the end, or two units
        return float(answer == truth)


def _rewritten(text: str) -> str:
    """An expression in the form in which it is compared.  Raises IndexError or ValueError where verl compares as is."""
    for before, after in _BEFORE_UNITS.items():
        text = text.replace(before, after)
    if _UNIT in text:
        text, _ = text.split(_UNIT)
    for before, after in _AFTER_UNITS.items():
        text = text.replace(before, after)
    text = f"0{text}" if text.startswith(".") else text
    name, is_equation, value = text.partition("=")
    if is_equation and "=" not in value and len(name) <= 2:
        text = value
    text = _with_fractions(_with_roots(text).replace(" ", ""))
    text = r"\frac{1}{2}" if text == "0.5" else text
    over, _, under = text.partition("/")
    try:
        return rf"\frac{{{int(over)}}}{{{int(under)}}}" if text == f"{int(over)}/{int(under)}" else text
    except ValueError:
        return text


def _with_roots(text: str) -> str:
    r"""\sqrt3 as \sqrt{3}."""
    head, *parts = text.split(r"\sqrt")
    return head + "".join(rf"\sqrt{part}" if part[0] == "{" else rf"\sqrt{{{part[0]}}}{part[1:]}" for part in parts)


def _with_fractions(text: str) -> str:
    r"""\frac12 and \frac1{2} as \frac{1}{2}; unchanged if one of them ends too early."""
    head, *parts = text.split(r"\frac")
    for part in parts:
        if part[0] != "{" and len(part) < 2:
            return text
        under = "" if part[0] == "{" else part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
        head += rf"\frac{part}" if part[0] == "{" else rf"\frac{{{part[0]}}}{under}"
    return head
