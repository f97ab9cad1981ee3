"""Checks the return value of a reward function and converts it to a `RewardResult`; joins those of several rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from megarl.samples.float32 import EXPECTED, is_finite
from megarl.samples.sample import Prompt, own_name, text_of


@dataclass(frozen=True)
class RewardResult:
    """Example: RewardResult(1.0, {"format": 1.0})."""

    reward: float
    extra: dict[str, float] = field(default_factory=dict)  # further numbers, for the log and for settings
    # What the answer says in the end, by which answers vote; None: not known.  No part of the reward, so not compared.
    pred: str | None = field(default=None, compare=False)


Outcome = RewardResult | str  # a result, or why there is none


def to_result(value: Any) -> RewardResult:
    """Convert a finite number, or a dict whose "score" is one.

    Its other numbers, finite too, become `extra`, its "pred" is what the answer says in the end, the rest is dropped.

    Raises TypeError or ValueError for anything else: a reward of NaN would make all advantages of its group NaN.
    """
    if not isinstance(value, dict):
        return RewardResult(_finite(value))
    if "score" not in value:
        raise TypeError(f"returned a dict with the keys {list(value)}; expected 'score' among them")
    numbers = {str(key): _number(item) for key, item in value.items() if key not in ("score", "pred")}
    extra = {own_name(key): number for key, number in numbers.items() if number is not None}
    for key, number in extra.items():
        if not is_finite(number):
            raise ValueError(f"returned {number} as its number {key!r}; {EXPECTED}")
    pred = value.get("pred")
    return RewardResult(_finite(value["score"]), extra, None if pred is None else str(pred))


def joined(results: Mapping[str, RewardResult], weights: Mapping[str, float]) -> RewardResult:
    """The weighted sum of several rewards; each one's own numbers are extra numbers.  A missing weight is 1.

    >>> joined({"math": RewardResult(1.0), "judge": RewardResult(0.5, {"votes": 3.0})}, {"judge": 0.2})
    RewardResult(reward=1.1, extra={'math': 1.0, 'judge': 0.5, 'judge/votes': 3.0})
    """
    extra: dict[str, float] = {}
    for name, result in results.items():
        extra[own_name(name)] = result.reward
        extra |= {own_name(f"{name}/{key}"): number for key, number in result.extra.items()}
    pred = next((result.pred for result in results.values() if result.pred is not None), None)
    return RewardResult(sum(weights.get(name, 1.0) * result.reward for name, result in results.items()), extra, pred)


def ground_truth_of(prompt: Prompt) -> str:
    """The expected answer as text.  Raises ValueError if the row has none, or one that is no text and no number."""
    truth = truth_of(prompt)
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float, Decimal)):
        raise ValueError(f"the ground truth is a {type(truth).__name__}; this reward expects a text or a number")
    return text_of(truth)


def truth_of(prompt: Prompt) -> Any:
    """The expected answer as the row has it.  Raises ValueError if it has none."""
    if prompt.ground_truth is None:
        raise ValueError("the prompt has no ground truth; expected data.ground_truth_key to name a field of the row")
    return prompt.ground_truth


def _finite(value: Any) -> float:
    number = _number(value)
    if number is None:
        raise TypeError(f"returned {value!r}, a {type(value).__name__}; expected a number or a dict with 'score'")
    if not is_finite(number):
        raise ValueError(f"returned {number}; {EXPECTED}")
    return number


def _number(value: Any) -> float | None:
    """Python, numpy and torch numbers as a float; None for text and for anything that is not a single number."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a torch tensor of several elements
        return None
