r"""The numbers of verl 0.9.1 for its own data sources, where they are not those of `gsm8k` and `math`.

They compare texts, so that 18.0 is not 18.
"""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards import register_reward
from megarl.rewards.functions.boxes import last_box
from megarl.rewards.result import ground_truth_of
from megarl.samples.sample import Completion, Prompt

_LAST = 300  # characters of an answer in which verl looks for the mark, or for "Answer:"
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_BOXED = re.compile(r"\A\\boxed\{")
_SPACE = r"\boxed "  # with it verl reads up to a dollar, and no other box

# What is replaced before two expressions are compared, in this order; as in the evaluation of Hendrycks et al. 2021,
# https://arxiv.org/abs/2103.03874.
_BEFORE_UNITS = {"\n": "", r"\!": "", r"\\": "\\", "tfrac": "frac", "dfrac": "frac", r"\left": "", r"\right": ""}
_BEFORE_UNITS |= {r"^{\circ}": "", r"^\circ": "", r"\$": ""}
_AFTER_UNITS = {r"\\%": "", r"\%": "", " .": " 0.", "{.": "{0."}
_UNIT = r"\text{ "

_DAPO_BOX = re.compile(r"\\boxed\{")
_LAST_OF_BOX = 100
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# Of Lewkowycz et al. 2022, https://arxiv.org/abs/2206.14858, appendix D.1.  Their order counts: a unit may be a part of
# another one.
_REPLACED = {
    **{"an ": "", "a ": "", ".$": "$", r"\$": "", r"\ ": "", " ": "", "mbox": "text"},
    **{r",\text{and}": ",", r"\text{and}": ",", r"\text{m}": r"\text{}"},
}
_UNITS_1 = r"square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents degrees"
_UNITS_2 = "cm gm pounds meters meals edges students childrentickets multiples"
_MARKS = (
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}", r"\mathrm{th}"),
    *(r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_REMOVED = (*_UNITS_1.split(), *_UNITS_2.split(), *_MARKS)
_REWRITTEN = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),  # what is between the first two dollars
    *((re.compile(rf"\\{command}\{{(.*?)\}}"), r"\1") for command in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


@register_reward("gsm8k_verl")
def gsm8k_verl(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the digits after the last "#### " of the last 300 characters are the ground truth, else 0.0."""
    truth, marked = ground_truth_of(prompt), _MARKED.findall(completion.text[-_LAST:])
    return float(bool(marked) and marked[-1].replace(",", "") == truth)


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


@register_reward("math_dapo")
def math_dapo(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    r"""1.0 if what follows the last "Answer:" is the ground truth, else -1.0, as `score`; `acc` 1.0 or 0.0; the answer.

    The prompts of DAPO's data set ask for such a last line (https://arxiv.org/abs/2503.14476).  Without one the answer
    is what the last \boxed{} of the last 100 characters holds, and must be the ground truth as it is, as in verl 0.9.1.
    Otherwise both texts are compared after a clean-up: \frac12 is \frac{1}{2}, but 1/2 is not.
    """
    truth, answers = ground_truth_of(prompt), _ANSWER.findall(completion.text[-_LAST:])
    answer = cleaned(answers[-1]) if answers else last_box(completion.text[-_LAST_OF_BOX:], _DAPO_BOX)
    is_right = answer == (cleaned(truth) if answers else truth)
    return {"score": 1.0 if is_right else -1.0, "acc": float(is_right), "pred": answer or ""}


def cleaned(text: str) -> str:
    r"""What follows the last "=", without units, words and marks that mean nothing.

    >>> cleaned(r"x = \text{about} 1,234 \text{ cm}")
    'about1,234'
    >>> cleaned("$1,234$ dollars")
    '1234'
    """
    text = text.rpartition("=")[2]
    for before, after in _REPLACED.items():
        text = text.replace(before, after)
    for mark in _REMOVED:
        text = text.replace(mark, "")
    for pattern, after in _REWRITTEN:
        text = pattern.sub(after, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()
