"""Policy losses that clip a ratio or a log-ratio: beyond the clip range a token has no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algo.losses.ratio import (
    LOG_RATIO_LIMIT,
    HyperparameterError,
    importance_ratio,
    require_distances,
    require_ratio_clips,
)
from megarl.algo.registry import register_policy_loss
from megarl.algo.segments import count_segments, segment_mean

GSPO_LOG_LIMIT = 10.0


@register_policy_loss("ppo", "vanilla", "grpo")  # GRPO's loss is PPO's; only the estimator differs
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

    When: the first choice; GRPO is this loss with `algorithm.adv_estimator=grpo`; clip_high=0.28 keeps the entropy high
    for longer (arXiv:2503.14476).

    Args: log_probs, old_log_probs, advantages [T]; mask [T] bool; segment_ids [T].
        clip_low, clip_high: how far the ratio may move; clip_c: c > 1, None switches the dual clip off.
    Returns: token loss [T]; pg_clipfrac [T], where the clip is active; pg_clipfrac_lower [T], where the dual clip is.
    """
    require_ratio_clips(clip_low, clip_high)
    if clip_c is not None and not clip_c > 1:
        raise HyperparameterError(f'clip_c={clip_c}: expected a number above 1, or "off"')
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


@register_policy_loss("gspo", per_sequence=True, agg_mode="seq-mean-token-mean")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One ratio per sequence: the geometric mean of its tokens' ratios.

    s = exp(min(l - sg(l) + sg(mean_b(l - l_old)), 10))
    L = max(-A s, -A clamp(s, 1 - clip_low, 1 + clip_high))

    s has the value of the sequence's ratio; each token's gradient is that of its own l.  Use it with
    loss_agg_mode=seq-mean-token-mean, which makes the objective one term per sequence.
    Paper: GSPO, arXiv:2507.18071 (this is its GSPO-token, equal to GSPO if A is constant over a sequence).

    When: mixtures of experts and long answers, where the ratio of single tokens is noise; with
    `actor.loss_agg_mode=seq-mean-token-mean`.

    Args: log_probs, old_log_probs, advantages [T]; mask [T] bool; segment_ids [T].
        clip_low, clip_high: how far the sequence's ratio may move.
    Returns: token loss [T]; pg_clipfrac [T], where the clip is active.
    """
    require_ratio_clips(clip_low, clip_high)
    mean_B = segment_mean(log_probs - old_log_probs, mask, segment_ids, count_segments(segment_ids))
    log_ratio = log_probs - log_probs.detach() + mean_B.detach()[segment_ids]
    ratio = log_ratio.clamp(max=GSPO_LOG_LIMIT).exp()
    loss_1 = -advantages * ratio
    loss_2 = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(loss_1, loss_2), {"pg_clipfrac": loss_2 > loss_1}


@register_policy_loss("gmpo", "geo_mean", per_sequence=True, agg_mode="seq-mean-token-mean")
def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The geometric mean of clipped ratios, one loss per sequence.

    A_b = mean_b A,   d = l - l_old
    d'  = sgn(A_b) min(sgn(A_b) d, sgn(A_b) clamp(d, -clip_low, clip_high))
    L_b = -A_b exp(clamp(mean_b d', -20, 20)), on every token of the sequence

    Use it with loss_agg_mode=seq-mean-token-mean, which makes the objective the mean of L_b.
    Paper: GMPO, arXiv:2507.20673.

    When: as gspo, but with a clip per token; with `actor.loss_agg_mode=seq-mean-token-mean`.

    Args: log_probs, old_log_probs, advantages [T]; mask [T] bool; segment_ids [T].
        clip_low, clip_high: how far a token's log-ratio may move.
    Returns: token loss [T]; pg_clipfrac [T], where a token's log-ratio is clipped.
    """
    require_distances(clip_low, clip_high)
    num_sequences = count_segments(segment_ids)
    advantage_B = segment_mean(advantages, mask, segment_ids, num_sequences)
    sign = advantage_B.sign()[segment_ids]
    moved = log_probs - old_log_probs
    clipped = moved.clamp(-clip_low, clip_high)
    kept = sign * torch.minimum(sign * moved, sign * clipped)
    mean_B = segment_mean(kept, mask, segment_ids, num_sequences)
    loss_B = -advantage_B * mean_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return loss_B[segment_ids], {"pg_clipfrac": sign * clipped < sign * moved}
