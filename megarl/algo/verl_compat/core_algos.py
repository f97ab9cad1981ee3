"""What a plug-in finds under verl's name for its algorithms: the decorators, and the aggregation of a loss."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algo.registry import register_adv_est, register_policy_loss
from megarl.algo.verl_compat.torch_functional import masked_mean

__all__ = ["agg_loss", "register_adv_est", "register_policy_loss"]


def agg_loss(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, **sizes: object) -> Tensor:
    """[B, sequence] losses as one number: the mean over tokens, or over sequences of their mean or sum.

    sizes: those of the whole batch in verl; here a plug-in's loss gets one sequence at a time, and they are not read.
    Raises: ValueError for another mode.
    """
    if loss_agg_mode in ("token-mean", "token_level"):
        return masked_mean(loss_mat, loss_mask)
    kept = torch.where(loss_mask != 0, loss_mat, 0.0)
    if loss_agg_mode in ("seq-mean-token-mean", "sample_level"):
        rows = kept.sum(-1) / loss_mask.sum(-1).clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-sum":
        rows = kept.sum(-1)
    else:
        raise ValueError(f"loss_agg_mode={loss_agg_mode!r}: expected the mode that the function is called with")
    return rows[loss_mask.sum(-1) > 0].mean()
