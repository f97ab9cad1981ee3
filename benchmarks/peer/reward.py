"""The reward of bench_peer.py on both sides: a random model's answers differ in it.  Imports nothing but Python."""

from __future__ import annotations

from typing import Any


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The share of digits among what was written."""
    return sum(map(str.isdigit, solution_str)) / max(len(solution_str), 1)


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Whether the answer is the right one."""
    return float(solution_str.strip() == ground_truth)
