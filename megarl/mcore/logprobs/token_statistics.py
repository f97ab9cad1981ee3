"""Statistics of each token's logits: how those of two parts of a vocabulary are merged, and how columns use them.

Here x_v = logit_v / temperature minus the maximum of the part, and y_v is the same for a reference's logits.  Two parts
of a vocabulary (two chunks, or two ranks) can be added when both are rescaled to the larger of their two maxima.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Rows of the statistics [NUM_STATISTICS, T].
MAX = 0  # the largest logit / temperature
SUM = 1  # sum_v e^x
LABEL = 2  # the label's logit / temperature; 0 in a part that does not hold it
X_SUM = 3  # sum_v x e^x, for entropy
SQUARES = 4  # sum_v e^(2x), for sum_pi_squared
REF_MAX = 5  # MAX of the reference, for full_kl
REF_SUM = 6  # sum_v e^y
DIFF = 7  # sum_v e^x (x - y)
NUM_STATISTICS = 8
LARGEST, SUMS = [MAX, REF_MAX], [SUM, LABEL, X_SUM, SQUARES, REF_SUM, DIFF]

# Rows of the factors [NUM_FACTORS, T]: the gradient of logit_v / temperature is
# [v = label] of_label + p (of_p + of_log_p log p + of_p_squared p + of_log_ratio (log p - log q)).
OF_LABEL, OF_P, OF_LOG_P, OF_P_SQUARED, OF_LOG_RATIO = 0, 1, 2, 3, 4
LOG_Z, REF_LOG_Z = 5, 6  # log p = logit / temperature - log_z, log q likewise
NUM_FACTORS = 7


def empty_statistics(num_tokens: int, like: Tensor) -> Tensor:
    """Statistics of no logits, float32 (float64 for float64): merging a part with it gives the part."""
    kind = torch.promote_types(like.dtype, torch.float32)
    found = torch.zeros(NUM_STATISTICS, num_tokens, dtype=kind, device=like.device)
    found[LARGEST] = torch.finfo(kind).min  # not -inf, because 0 * -inf is NaN
    return found


def merged(one: Tensor, other: Tensor) -> Tensor:
    """The statistics of two parts together; overwrites both."""
    largest = torch.maximum(one[LARGEST], other[LARGEST])
    _tell_relative_to_(one, largest)
    _tell_relative_to_(other, largest)
    one[SUMS] += other[SUMS]
    return one


def all_reduce_(found: Tensor, group: Any) -> None:
    """Each rank's part -> the whole vocabulary, with one MAX and one SUM all-reduce."""
    if group.size() == 1:
        return
    largest = found[LARGEST]
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    _tell_relative_to_(found, largest)
    sums = found[SUMS]
    dist.all_reduce(sums, group=group)
    found[SUMS] = sums


def _tell_relative_to_(found: Tensor, largest: Tensor) -> None:
    down, ref_down = found[LARGEST] - largest
    scale = down.exp()
    found[DIFF] = scale * (found[DIFF] + (down - ref_down) * found[SUM])
    found[X_SUM] = scale * (found[X_SUM] + down * found[SUM])
    found[SUM] *= scale
    found[SQUARES] *= scale.square()
    found[REF_SUM] *= ref_down.exp()
    found[LARGEST] = largest


def columns_of(found: Tensor) -> dict[str, Tensor]:
    """All columns; those whose statistics were not computed are meaningless."""
    log_sum, total = found[SUM].log(), found[SUM]
    return {
        "log_probs": found[LABEL] - found[MAX] - log_sum,
        "entropy": log_sum - found[X_SUM] / total,
        "sum_pi_squared": found[SQUARES] / total.square(),
        "full_kl": found[DIFF] / total - log_sum + found[REF_SUM].log(),
    }


def factors_of(found: Tensor, grads: Mapping[str, Tensor]) -> Tensor:
    """Statistics of the whole vocabulary and d loss/d column [T] -> [NUM_FACTORS, T].

    With p the softmax: d log p(label)/dx_v = [v = label] - p_v; dH/dx_v = -p_v (log p_v + H);
    d(sum p^2)/dx_v = 2 p_v (p_v - sum p^2); dKL/dx_v = p_v (log p_v - log q_v - KL).
    """
    columns, out = columns_of(found), found.new_zeros(NUM_FACTORS, found.size(1))
    if (grad := grads.get("log_probs")) is not None:
        out[OF_LABEL] = grad
        out[OF_P] -= grad
    if (grad := grads.get("entropy")) is not None:
        out[OF_LOG_P] = -grad
        out[OF_P] -= grad * columns["entropy"]
    if (grad := grads.get("sum_pi_squared")) is not None:
        out[OF_P_SQUARED] = 2 * grad
        out[OF_P] -= 2 * grad * columns["sum_pi_squared"]
    if (grad := grads.get("full_kl")) is not None:
        out[OF_LOG_RATIO] = grad
        out[OF_P] -= grad * columns["full_kl"]
    out[LOG_Z] = found[MAX] + found[SUM].log()
    out[REF_LOG_Z] = found[REF_MAX] + found[REF_SUM].log()
    return out
