"""The critic's loss: one number per token; the token weights are data, as for the policy."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float | None = 0.5
) -> tuple[Tensor, Tensor]:
    """Clipped squared error: the larger of the errors of the value and of the clipped value.

    V_c = V_old + clamp(V - V_old, -cliprange, cliprange)
    L = 0.5 max((V - R)^2, (V_c - R)^2)

    Paper: PPO's public implementation; studied in arXiv:2005.12729.

    Args: values, old_values, returns [T]; cliprange: None switches the clip off.
    Returns: token loss [T]; [T] bool, where the clipped error is larger (the gradient is 0 there).
    """
    error = (values - returns).square()
    if cliprange is None:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    # The same V_c, written so that inside the range it equals V bit for bit and no rounding counts as a clip.
    clipped_values = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    clipped_error = (clipped_values - returns).square()
    return 0.5 * torch.maximum(error, clipped_error), clipped_error > error
