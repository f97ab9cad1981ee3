"""What a plug-in finds under verl's name for its algorithms: decorators, names of estimators, a loss's aggregation."""

from __future__ import annotations

from enum import StrEnum, auto

import torch
from torch import Tensor

from megarl.algo.registry import register_adv_est, register_policy_loss
from megarl.algo.verl_compat.torch_functional import masked_mean

__all__ = ["AdvantageEstimator", "agg_loss", "register_adv_est", "register_policy_loss"]


class AdvantageEstimator(StrEnum):
    """Names of verl's estimators; register_adv_est(AdvantageEstimator.RLOO_VECTORIZED) takes one as its text."""

    GAE = auto()
    GRPO = auto()
    REINFORCE_PLUS_PLUS = auto()
    REINFORCE_PLUS_PLUS_BASELINE = auto()
    REMAX = auto()
    RLOO = auto()
    OPO = auto()
    GRPO_PASSK = auto()
    GPG = auto()
    RLOO_VECTORIZED = auto()
    GRPO_VECTORIZED = auto()
    OPTIMAL_TOKEN_BASELINE = auto()
    TIR_OPTIMAL_TOKEN_BASELINE = auto()
    GDPO = auto()


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
