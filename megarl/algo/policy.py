"""Policy losses: functions of packed [T] columns that return one loss a token.

None of them aggregates: the weight of a token is data (aggregate.py).  None adds entropy or KL: loss.py does, the same
way for all.  A function gets columns whose masked places hold 0, and what it returns there is thrown away.  Its
keyword-only arguments are its knobs; their defaults are its own.  Adding one: `@register_policy_loss("name")`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: finite in float32 even when squared and multiplied by an advantage


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """r = exp(clamp(l - l_old, -20, 20)), [T]."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate with dual clip.

    L1 = -A r,   L2 = -A clamp(r, 1 - clip_low, 1 + clip_high),   L = max(L1, L2)
    where A < 0: L = min(L, -c A), so that one very unlikely token cannot dominate a step

    Papers: PPO, arXiv:1707.06347; dual clip, arXiv:1912.09729; unequal clips, arXiv:2503.14476 (DAPO).

    Args: log_probs, old_log_probs, advantages [T]; mask [T] bool; segment_ids [T].
        clip_low, clip_high: how far the ratio may move; clip_c: c > 1, None switches the dual clip off.
    Returns: token loss [T]; pg_clipfrac [T], where the clip holds; pg_clipfrac_lower [T], where the dual clip does.
    """
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}: want 0 <= clip_low <= 1 and 0 <= clip_high")
    if clip_c is not None and not clip_c > 1:
        raise ValueError(f'clip_c={clip_c}: want a number above 1, or "off"')
    ratio = importance_ratio(log_probs, old_log_probs)
    loss_1 = -advantages * ratio
    loss_2 = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(loss_1, loss_2)
    info = {"pg_clipfrac": loss_2 > loss_1}
    if clip_c is not None:
        bound = -clip_c * advantages
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
        info["pg_clipfrac_lower"] = (advantages < 0) & (loss_1 > bound)
    return loss, info


def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, segment_ids: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The score-function gradient.

    L = -A l

    Paper: Williams 1992, doi:10.1007/BF00992696.  On-policy only: old_log_probs are not used.

    Args: log_probs, old_log_probs, advantages [T]; mask [T] bool; segment_ids [T].
    Returns: token loss [T]; no statistics of its own.
    """
    return -advantages * log_probs, {}


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "vanilla": ppo,
    "grpo": ppo,  # GRPO's loss is PPO's; what differs is the estimator
    "reinforce": reinforce,
}
