r"""Reward 1 when the final expression of a completion equals the ground truth as mathematics: \frac{1}{2} is 0.5.

By the library math-verify, which reads LaTeX and plain expressions and compares them with sympy.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify

from megarl.rewards import register_reward
from megarl.rewards.result import ground_truth_of
from megarl.sample import Completion, Prompt

# The library limits its time with signal.alarm, which would disarm the pool's own limit for the sample; without it, it
# warns once that somebody else has to.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@register_reward("math")
def math_answer(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the two are equal, else 0.0; what cannot be read as an expression is wrong."""
    truth = ground_truth_of(prompt)
    # A bare "\frac{1}{2}" is only read as LaTeX between dollars; a ground truth is always one expression.
    gold = parse(truth if "$" in truth or r"\boxed" in truth else f"${truth}$", parsing_timeout=None)
    answer = parse(completion.text, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))
