"""Rewards that fail when they are ordered to."""

import subprocess
import time
from typing import Any

from chaos_claims import obey


def or_fails(score: float) -> float:
    """The score, unless there is an order."""
    kind = obey("reward")
    if kind == "hang":
        time.sleep(3600)
    if kind == "memory":
        bytearray(1 << 40)
    if kind == "print":
        print("x" * (1 << 20))
    if kind == "fork":  # a child that would outlive its sample
        subprocess.Popen(["sleep", "100000"])
    return float("nan") if kind == "nan" else score


def exact(prompt: Any, completion: Any) -> float:
    """The quickstart's reward."""
    return or_fails(float(completion.text.strip() == prompt.ground_truth))


def digits(prompt: Any, completion: Any) -> float:
    """A reward that an untrained model gets a part of."""
    return or_fails(sum(map(str.isdigit, completion.text)) / 6)
