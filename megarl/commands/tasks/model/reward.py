"""The reward of an answer: 1 if its last number is the right one, else 0."""

import re


def score(solution_str: str, ground_truth: str) -> float:
    numbers = re.findall(r"-?\d+", solution_str.replace(",", ""))
    return float(numbers[-1:] == [ground_truth])
