"""Rewards that fail when they are ordered to."""

from __future__ import annotations

import time
from typing import Any

from chaos_claims import obey


def fails_if_ordered() -> None:
    if obey("reward"):
        time.sleep(3600)


def exact(prompt: Any, completion: Any) -> float:
    """The quickstart's reward."""
    fails_if_ordered()
    return float(completion.text.strip() == prompt.ground_truth)


def digits(prompt: Any, completion: Any) -> float:
    """A reward that an untrained model gets a part of."""
    fails_if_ordered()
    return sum(map(str.isdigit, completion.text)) / 6
