"""Lengths of completions in tokens: those of a trace by visit, and the law that a trace is drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.samples.sample import Prompt


class Trace:
    """Lengths of completions by visit, the same whenever they are asked for: [visits, n], used again from its start."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __call__(self, prompt: Prompt, n: int) -> Sequence[int]:
        row = self.lengths[prompt.extra["visit"] % len(self.lengths)]
        return [int(row[index % len(row)]) for index in range(n)]


def lognormal_trace(
    visits: int,
    n: int,
    *,
    mean: float,
    longest: int,
    of_prompts: float = 0.8,
    of_answers: float = 0.4,
    seed: int = 0,
) -> np.ndarray:
    """Lengths [visits, n]: a prompt has its own scale, around which its answers lie; both factors are lognormal.

    `of_prompts` and `of_answers`: standard deviations of their logarithms.  `mean` is that before the limit `longest`
    cuts.
    """
    rng = np.random.default_rng(seed)
    scales = rng.lognormal(-(of_prompts**2) / 2, of_prompts, (visits, 1))
    factors = rng.lognormal(-(of_answers**2) / 2, of_answers, (visits, n))
    return np.clip(np.rint(mean * scales * factors), 1, longest).astype(np.int32)
