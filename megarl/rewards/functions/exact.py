"""Reward 1 if the completion equals the ground truth, character by character."""

from __future__ import annotations

from megarl.rewards import register_reward
from megarl.rewards.result import ground_truth_of
from megarl.sample import Completion, Prompt


@register_reward("exact")
def exact(prompt: Prompt, completion: Completion) -> float:
    """1.0 if both texts are equal after white space around them is removed, else 0.0."""
    return float(completion.text.strip() == ground_truth_of(prompt).strip())
