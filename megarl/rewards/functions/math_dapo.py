r"""Reward 1 if what follows the last "Answer:" is the ground truth, else -1: the rule of DAPO's data set, as in verl.

The prompts of that data set ask for such a last line (https://arxiv.org/abs/2503.14476).  Without one the answer is
what the last \boxed{} of the last 100 characters holds, and must be the ground truth as it is, as in verl 0.9.1.
Otherwise both texts are compared after the clean-up of Lewkowycz et al. 2022 (https://arxiv.org/abs/2206.14858,
appendix D.1): \frac12 is \frac{1}{2}, but 1/2 is not.
"""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards import register_reward
from megarl.rewards.functions.boxes import last_box
from megarl.rewards.result import ground_truth_of
from megarl.sample import Completion, Prompt

_LAST = 300  # characters of an answer that are read
_LAST_OF_BOX = 100
_BOX = re.compile(r"\\boxed\{")
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# The tables of that appendix.  Their order counts: a unit may be a part of another one.
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


@register_reward("math_dapo")
def math_dapo(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """The reward 1.0 or -1.0 as `score`, `acc` 1.0 or 0.0, and what the answer says."""
    truth, found = ground_truth_of(prompt), _ANSWER.findall(completion.text[-_LAST:])
    answer = cleaned(found[-1]) if found else last_box(completion.text[-_LAST_OF_BOX:], _BOX)
    is_right = answer == (cleaned(truth) if found else truth)
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
