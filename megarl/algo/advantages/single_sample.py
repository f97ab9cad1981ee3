"""Advantage estimators that use each sample alone, without its prompt group."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algo.advantages.gae import gae, returns_to_go, whiten
from megarl.algo.registry import register_adv_est
from megarl.algo.segments import clean


@register_adv_est("none")
def no_advantages(rewards: Tensor, mask: Tensor, segment_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Every advantage is 0: rewards are logged, and teach nothing.

    A = 0

    When: the policy learns from teachers alone.

    Args: rewards [N]; mask [N] bool; segment_ids [N].
    Returns: advantages and returns [N], all 0.
    """
    return torch.zeros_like(rewards), torch.zeros_like(rewards)


@register_adv_est("gae")
def gae_whitened(
    rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, values: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, whitened over the batch; the returns are not whitened.

    delta_t = r_t + gamma V_{t'} - V_t,   A_t = delta_t + gamma lam A_{t'};   A whitened

    Paper: arXiv:1506.02438.

    When: a critic is affordable; one answer per prompt is enough; rewards in the middle of an answer.

    Args: rewards [N]; mask [N] bool; segment_ids [N]; values [N].
    Returns: advantages, returns [N].
    """
    advantages, returns = gae(rewards, values, mask, segment_ids, gamma=gamma, lam=lam)
    return whiten(advantages, mask), returns


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus(rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, gamma: float) -> tuple[Tensor, Tensor]:
    """The return-to-go, whitened over the whole batch.

    A = whiten(G),   G_t = r_t + gamma G_{t'},   t' the next trainable token

    G is carried over masked tokens (public code restarts it there).  Paper: arXiv:2501.03262.

    When: one answer per prompt, no critic.

    Args: rewards [N]; mask [N] bool; segment_ids [N].
    Returns: advantages [N] and returns [N], which are G.
    """
    returns = returns_to_go(rewards, mask, segment_ids, gamma=gamma)
    return whiten(returns, mask), returns


@register_adv_est("remax")
def remax(rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, greedy_score: Tensor) -> tuple[Tensor, Tensor]:
    """The return-to-go relative to the reward of a greedy completion of the same prompt.

    A_t = G_t - R_greedy,   G_t = sum of the rewards from t on, not discounted, like the baseline

    Paper: arXiv:2310.10505.

    When: one answer per prompt, no critic; costs an additional greedy answer per prompt.

    Args: rewards [N]; mask [N] bool; segment_ids [N]; greedy_score [B], the same for all samples of a prompt.
    Returns: advantages [N] and returns [N], which are G.
    """
    returns = returns_to_go(rewards, mask, segment_ids, gamma=1.0)
    advantages = returns.double() - greedy_score.double()[segment_ids]
    return clean(advantages, mask).to(torch.float32), returns
