r"""Reward 1 if the final expression of a completion is mathematically equal to the ground truth: \frac{1}{2} is 0.5.

It uses the library math-verify, which parses LaTeX and plain expressions and compares them with sympy.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify

from megarl.rewards import register_reward
from megarl.rewards.result import ground_truth_of
from megarl.sample import Completion, Prompt

# The library's own timeout uses signal.alarm, which would disarm the pool's timeout of the sample; without it, the
# library logs a warning.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@register_reward("math")
def math_answer(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the two are equal, else 0.0; an answer that cannot be parsed is wrong."""
    truth = ground_truth_of(prompt)
    # "\frac{1}{2}" is parsed as LaTeX only between dollar signs; a ground truth is always one expression.
    gold = parse(truth if "$" in truth or r"\boxed" in truth else f"${truth}$", parsing_timeout=None)
    answer = parse(completion.text, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))
