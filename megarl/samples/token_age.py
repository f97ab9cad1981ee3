"""The age of a token: how many versions the weights in training are ahead of those that generated it.

Statistics by age use the buckets 0, 1, 2, 3-4, 5-8 and 9 or more: fine where most tokens are, wide where few are.
"""

from __future__ import annotations

from torch import Tensor

BUCKETS: dict[str, tuple[int, float]] = {  # name -> lowest and highest age
    "age_0": (0, 0),
    "age_1": (1, 1),
    "age_2": (2, 2),
    "age_3_4": (3, 4),
    "age_5_8": (5, 8),
    "age_9_up": (9, float("inf")),
}


def token_ages(versions: Tensor, version: int) -> Tensor:
    """[N] int32, without meaning on prompts.  `versions`: the column; `version`: of the weights in training."""
    return version - versions


def by_age(ages: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Name of a bucket -> [N] bool, the unmasked tokens in it; empty buckets are left out.

    {} if all tokens are of age 0: then statistics by age would only repeat those of the whole batch.
    """
    if not (ages[mask] > 0).any():
        return {}
    parts = {name: mask & (low <= ages) & (ages <= high) for name, (low, high) in BUCKETS.items()}
    return {name: part for name, part in parts.items() if part.any()}
