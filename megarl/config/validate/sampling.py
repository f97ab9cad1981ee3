"""Checks whether servers can tell from which tokens they drew, where top-p or top-k left only a part of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from megarl.config.schema import Config

MOST_IN_MASK = 4096  # the default of _LIMIT
_LIMIT = "--sampling-mask-max-tokens"  # of SGLang; where it is set, the servers say it: trainer/abilities.py
_DRAFTS = "--speculative-algorithm"


def contradictions(config: Config) -> Iterator[str]:
    """One sentence for each invalid combination."""
    rollout = config.rollout
    if not config.narrows_sampling or rollout.engine == "hf":
        return
    options = [word.split("=")[0] for word in rollout.sglang.args]
    most = None if _LIMIT in options else MOST_IN_MASK
    if rollout.top_k == -1 or (most and rollout.top_k > most):
        given = f"rollout.top_p={rollout.top_p}" if rollout.top_k == -1 else f"rollout.top_k={rollout.top_k}"
        told = f"SGLang tells from which tokens it drew only for a rollout.top_k of 1 to {most or _LIMIT}"
        yield f"{given}: {told}; expected one, or rollout.engine=hf"
    for word, following in pairwise([*rollout.sglang.args, ""]):
        if word.split("=")[0] == _DRAFTS and "DFLASH" not in word + following:
            told = "with it SGLang does not tell from which tokens it drew"
            wanted = "no such option, or rollout.top_p=1 and rollout.top_k=-1"
            yield f"rollout.sglang.args={word}: {told}; expected {wanted}"
