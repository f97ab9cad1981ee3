"""Checks the return value of a reward function and converts it to a `RewardResult`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from megarl.sample import Prompt


@dataclass(frozen=True)
class RewardResult:
    """Example: RewardResult(1.0, {"format": 1.0})."""

    reward: float
    extra: dict[str, float] = field(default_factory=dict)  # further numbers, for the log and for settings


def to_result(value: Any) -> RewardResult:
    """Convert a finite number, or a dict whose "score" is one; its other numbers become `extra`, the rest is dropped.

    Raises TypeError or ValueError for anything else: a reward of NaN would make all advantages of its group NaN.
    """
    if not isinstance(value, dict):
        return RewardResult(_finite(value))
    if "score" not in value:
        raise TypeError(f"returned a dict with the keys {list(value)}; expected 'score' among them")
    numbers = {str(key): _number(item) for key, item in value.items() if key != "score"}
    extra = {key: number for key, number in numbers.items() if number is not None}
    return RewardResult(_finite(value["score"]), extra)


def ground_truth_of(prompt: Prompt) -> str:
    """The expected answer.  Raises ValueError if the row has none."""
    if prompt.ground_truth is None:
        raise ValueError("the prompt has no ground truth; expected data.ground_truth_key to name a field of the row")
    return prompt.ground_truth


def _finite(value: Any) -> float:
    number = _number(value)
    if number is None:
        raise TypeError(f"returned {value!r}, a {type(value).__name__}; expected a number or a dict with 'score'")
    if not math.isfinite(number):
        raise ValueError(f"returned {number}; expected a finite number")
    return number


def _number(value: Any) -> float | None:
    """Python, numpy and torch numbers as a float; None for text and for anything that is not a single number."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a torch tensor of several elements
        return None
