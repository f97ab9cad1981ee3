"""Policy losses that treat a few tokens of high covariance differently, and the selection of those tokens.

    cov = (A - mean A) (l_old - mean l_old),   means over the trainable tokens of the whole optimizer step

Paper: "The entropy mechanism of reinforcement learning for reasoning language models", arXiv:2505.22617: the tokens
with a large covariance drive the entropy down.

Public code selects by rank or at random among the tokens of a micro-batch, from the current l; then selection and
gradient depend on the micro-batch size.  Here the selection is made once from the whole optimizer step, with its own
random generator, before the step is split; it is passed on as the column `selected`.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from megarl.algo.losses.clipped import ppo
from megarl.algo.losses.ratio import HyperparameterError, importance_ratio, require_positive
from megarl.algo.registry import register_policy_loss
from megarl.algo.segments import clean


def select_clip_cov(
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    generator: Generator,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Tensor:
    """k random tokens with clip_cov_lb < cov < clip_cov_ub; all of these if there are fewer than k.

    k = max(1, floor(clip_cov_ratio n)),   n trainable tokens in the step

    Args: old_log_probs, advantages [N] of the whole optimizer step; mask [N] bool.
    Returns: [N] bool.
    """
    if not clip_cov_lb < clip_cov_ub:
        raise HyperparameterError(
            f"clip_cov_lb={clip_cov_lb}, clip_cov_ub={clip_cov_ub}: expected the first below the second"
        )
    cov = covariance(old_log_probs, advantages, mask)
    candidates = (mask & (cov > clip_cov_lb) & (cov < clip_cov_ub)).nonzero().squeeze(1)
    order = torch.randperm(len(candidates), generator=generator)
    return _at(candidates[order[: num_selected(clip_cov_ratio, mask, "clip_cov_ratio")]], mask)


def select_kl_cov(
    old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, generator: Generator, kl_cov_ratio: float = 2e-4
) -> Tensor:
    """The k tokens with the largest cov, k = max(1, floor(kl_cov_ratio n)); of equal ones, the earlier.

    Args: old_log_probs, advantages [N] of the whole optimizer step; mask [N] bool; generator: not used.
    Returns: [N] bool.
    """
    trainable = mask.nonzero().squeeze(1)
    cov = covariance(old_log_probs, advantages, mask)[trainable]
    order = cov.argsort(descending=True, stable=True)
    return _at(trainable[order[: num_selected(kl_cov_ratio, mask, "kl_cov_ratio")]], mask)


@register_policy_loss("clip_cov", select=select_clip_cov)
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    selected: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO without dual clip; the selected tokens have no gradient.

    L = 0 where selected, else max(-A r, -A clamp(r, 1 - clip_low, 1 + clip_high))

    The selected tokens still count in every denominator.  Paper: Clip-Cov, arXiv:2505.22617.

    When: the entropy collapses under `ppo`.

    Args: log_probs, old_log_probs, advantages, selected [T]; mask [T] bool; segment_ids [T].
        clip_low, clip_high: how far the ratio may move.
    Returns: token loss [T]; pg_clipfrac [T], where the clip is active; cov_selected [T].
    """
    columns = (log_probs, old_log_probs, advantages, mask, segment_ids)
    loss, info = ppo(*columns, clip_low=clip_low, clip_high=clip_high, clip_c=None)
    chosen = selected != 0
    return torch.where(chosen, 0.0, loss), {"pg_clipfrac": info["pg_clipfrac"] & ~chosen, "cov_selected": chosen}


@register_policy_loss("kl_cov", select=select_kl_cov)
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    selected: Tensor,
    ppo_kl_coef: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The unclipped surrogate, with a penalty on the selected tokens that pulls them towards the old policy.

    L = -A r, plus ppo_kl_coef |l - l_old| where selected

    Paper: KL-Cov, arXiv:2505.22617.

    When: the entropy collapses under `ppo`; this loss has no clip.

    Args: log_probs, old_log_probs, advantages, selected [T]; mask [T] bool; segment_ids [T].
        ppo_kl_coef: the strength of the penalty, above 0.
    Returns: token loss [T]; cov_selected [T].
    """
    require_positive(ppo_kl_coef=ppo_kl_coef)
    chosen = selected != 0
    pull = ppo_kl_coef * (log_probs - old_log_probs).abs()
    loss = -advantages * importance_ratio(log_probs, old_log_probs) + torch.where(chosen, pull, 0.0)
    return loss, {"cov_selected": chosen}


def covariance(old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """cov [N] in float64, 0 at masked places."""
    count = mask.sum().clamp(min=1)
    old, advantage = clean(old_log_probs, mask).double(), clean(advantages, mask).double()
    return torch.where(mask, (advantage - advantage.sum() / count) * (old - old.sum() / count), 0.0)


def num_selected(share: float, mask: Tensor, name: str) -> int:
    """k = max(1, floor(share n)).  Raises: HyperparameterError for a share outside (0, 1]."""
    if not 0 < share <= 1:
        raise HyperparameterError(f"{name}={share}: expected a number above 0 and at most 1")
    return max(1, math.floor(share * int(mask.sum()) + 1e-9))  # 0.29 * 100 is 28.999999999999996


def _at(places: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros_like(mask).index_fill(0, places, True)
