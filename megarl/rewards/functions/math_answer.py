r"""Reward 1 if the final expression of a completion is mathematically equal to the ground truth: \frac{1}{2} is 0.5.

It uses the library math-verify, which parses LaTeX and plain expressions and compares them with sympy.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify

from megarl.rewards import register_reward
from megarl.rewards.functions.math_limits import ProcessorTimeError, final_part, is_small, processor_time
from megarl.rewards.result import ground_truth_of
from megarl.rewards.surroundings import time_limit_s
from megarl.sample import Completion, Prompt

_SHARE = 0.4  # of a sample's time, for an answer that takes long; the ground truth is read before

# The library's own timeout uses signal.alarm, which would disarm the pool's timeout of the sample; without it, the
# library logs a warning.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@register_reward("math")
def math_answer(prompt: Prompt, completion: Completion) -> float:
    """1.0 if the two are equal, else 0.0; an answer that cannot be parsed, or takes too long, is wrong."""
    truth = ground_truth_of(prompt)
    # "\frac{1}{2}" is parsed as LaTeX only between dollar signs; a ground truth is always one expression.
    gold = parse(truth if "$" in truth or r"\boxed" in truth else f"${truth}$", parsing_timeout=None)
    part = final_part(completion.text)
    if part is None:
        return 0.0
    try:
        with processor_time(_SHARE * time_limit_s()):
            answer = parse(part, parsing_timeout=None)
            if not all(map(is_small, (*gold, *answer))):  # calculated by nobody: equal if written alike
                return float(any(item in gold for item in answer))
            return float(verify(gold, answer, timeout_seconds=None))
    except ProcessorTimeError:
        return 0.0
