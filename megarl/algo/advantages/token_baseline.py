"""A baseline per token: at each step, the samples of a group are weighted by their accumulated gradient norm."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algo.advantages.gae import returns_to_go
from megarl.algo.advantages.groups import samples_of
from megarl.algo.registry import register_adv_est
from megarl.algo.segments import segment_sum


@register_adv_est("optimal_token_baseline")
def optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    group_ids: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    """The baseline that minimises the variance of the gradient, with a proxy for its squared norm.

    W_t = sum_{j <= t} m_j (1 - 2 p_j + sum_v p_v^2),   A_t = G_t - sum_g(G_t W_t) / (sum_g W_t + 1e-8)

    p = exp(l_old); G the discounted return-to-go; t counts the trainable tokens of a sample, and the sums run over the
    samples of its group that have a t-th token.  If a single sample is left at t, the baseline is 0 and A = G; a sample
    alone in its group gets 0.  Paper: arXiv:2602.07078.

    When: long answers, where a baseline per token lowers the variance.

    Args: rewards [N]; mask [N] bool; segment_ids [N]; group_ids [B]; old_log_probs [N]; sum_pi_squared [N], the sum of
        the squared probabilities over the vocabulary.
    Returns: advantages [N] and returns [N], which are G.
    """
    returns = returns_to_go(rewards, mask, segment_ids, gamma=gamma)
    _, groups = samples_of(rewards, mask, segment_ids, group_ids)
    steps = mask.nonzero().squeeze(1)  # S trainable tokens, in order
    segment_S, G_S = segment_ids[steps], returns[steps].double()
    # below 0 only by rounding, because sum_v p_v^2 >= p^2
    energy_S = (1 - 2 * old_log_probs[steps].double().exp() + sum_pi_squared[steps].double()).clamp(min=0)
    W_S, index_S = _running_sum(energy_S, segment_S), _running_sum(torch.ones_like(energy_S), segment_S).long()

    # a place is a t of a group; sums over the samples that reach it
    place_S = groups.index[segment_S] * (len(steps) + 1) + index_S
    places, at_S, reached_P = place_S.unique(return_inverse=True, return_counts=True)
    weighed_P = segment_sum(G_S * W_S, at_S, len(places)) / (segment_sum(W_S, at_S, len(places)) + 1e-8)
    baseline_S = torch.where(reached_P > 1, weighed_P, 0.0)[at_S]
    advantage_S = torch.where(groups.compares[segment_S], G_S - baseline_S, 0.0)
    return torch.zeros_like(returns).index_put((steps,), advantage_S.to(returns.dtype)), returns


def _running_sum(x: Tensor, segment_S: Tensor) -> Tensor:
    """x [S] -> [S]: the sum from the first step of the sequence up to and including this step."""
    total = x.cumsum(0)
    begins = torch.ones_like(segment_S, dtype=torch.bool)
    begins[1:] = segment_S[1:] != segment_S[:-1]
    starts = begins.nonzero().squeeze(1)
    return total - (total - x)[starts][begins.long().cumsum(0) - 1]
