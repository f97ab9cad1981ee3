"""The canary prompt: after a push every server computes its log-probs, before its completions may be used.

Digests show that the weights arrived.  This shows that the server computes with them: that names mean the same on both
sides, and that the server recomputed what it derives from the weights.  It costs one prefill on each server.  The
prefill uses no cached prefix, so it does not check old prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Canary:
    """Example: Canary((5, 6, 7), log_probs=(-0.7, -1.2)), the trainer's log-probs of tokens 6 and 7."""

    prompt_ids: tuple[int, ...]
    log_probs: tuple[float, ...] | None = None  # None: the servers are only compared with each other
    tolerance: float = 1e-3  # in nats; bfloat16 servers need about 0.1


def disagreement(canary: Canary, heard: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """url -> what is wrong with its answer.

    The median difference over the tokens is compared with the tolerance.  A tensor in the wrong place changes all
    log-probs by whole units.  But in bfloat16, or if another expert is chosen, single improbable tokens can differ by
    more than any limit.  Without the trainer's values, answers are compared with the median of all servers, at half the
    tolerance: if the only two servers differ by more than the tolerance, both fail.
    """
    count = len(canary.prompt_ids) - 1
    limit = canary.tolerance
    whose = "the trainer"
    found = {url: f"{len(answer)} log-probs, expected {count}" for url, answer in heard.items() if len(answer) != count}
    for url, answer in heard.items():  # such a number would spoil the middle of all
        if url not in found and not all(map(math.isfinite, answer)):
            found[url] = "log-probs that are not finite"
    answers = {url: answer for url, answer in heard.items() if url not in found}
    expected = canary.log_probs
    if expected is None and answers:
        expected = tuple(median(column) for column in zip(*answers.values(), strict=True))
        limit, whose = limit / 2, "the middle of all servers"
    for url, answer in answers.items():
        assert expected is not None, "there are answers, so there is something to compare them with"
        gaps = [abs(a - b) for a, b in zip(answer, expected, strict=True)]
        # The trainer's own numbers may not be finite, and of such ones there is no median.
        middle = median(gaps or [0.0]) if all(map(math.isfinite, gaps)) else math.nan
        if not middle <= limit:
            found[url] = f"log-probs that differ by {middle:.2g} in the median from those of {whose}, limit {limit:.2g}"
    return {url: f"{url} answers the canary prompt with {reason}" for url, reason in found.items()}
