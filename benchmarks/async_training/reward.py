"""The reward of bench_async.py's task: the number in front of the dots is right.  Imports nothing but Python."""

from __future__ import annotations

from typing import Any

DOT = "."


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 if the answer is the number, however many dots follow."""
    return float(solution_str.rstrip(DOT) == ground_truth)
