"""Advantage estimators: once per batch, on whole samples.

An estimator is a function of packed columns, f(rewards [N], mask [N], segment_ids [N], *, ...), that returns
(advantages [N], returns [N]).  Its keyword-only arguments are what it asks for, by name: any other column of the batch,
`group_ids` and other rows [B], or a setting of estimate.py.  Masked tokens are no steps of the decision process.
`advantages` is 0 at masked places.  Here: those that look at each sample alone, and the table of all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algo.advantages.gae import gae, returns_to_go, whiten
from megarl.algo.advantages.group_relative import gdpo, gpg, grpo, grpo_passk, opo, reinforce_plus_plus_baseline, rloo
from megarl.algo.advantages.token_baseline import optimal_token_baseline
from megarl.algo.segments import clean

AdvEstimator = Callable[..., tuple[Tensor, Tensor]]


def gae_whitened(
    rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, values: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """returns.gae, whitened over the batch; the returns are those before whitening.

    Args: rewards [N]; mask [N] bool; segment_ids [N]; values [N].
    Returns: advantages, returns [N].
    """
    advantages, returns = gae(rewards, values, mask, segment_ids, gamma=gamma, lam=lam)
    return whiten(advantages, mask), returns


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, gamma: float) -> tuple[Tensor, Tensor]:
    """The return to go, against the mean and with the spread of the whole batch.

    A = whiten(G),   G_t = r_t + gamma G_{t'},   t' the next trainable token

    G is carried over masked tokens (public code restarts it there).  Paper: arXiv:2501.03262.

    Args: rewards [N]; mask [N] bool; segment_ids [N].
    Returns: advantages [N] and returns [N], which are G.
    """
    returns = returns_to_go(rewards, mask, segment_ids, gamma=gamma)
    return whiten(returns, mask), returns


def remax(rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, greedy_score: Tensor) -> tuple[Tensor, Tensor]:
    """The return to go, against the reward of a greedy completion of the same prompt.

    A_t = G_t - R_greedy,   G_t = sum of the rewards from t on, not discounted: the baseline is not either

    Paper: arXiv:2310.10505.

    Args: rewards [N]; mask [N] bool; segment_ids [N]; greedy_score [B], the same for all samples of a prompt.
    Returns: advantages [N] and returns [N], which are G.
    """
    returns = returns_to_go(rewards, mask, segment_ids, gamma=1.0)
    advantages = returns.double() - greedy_score.double()[segment_ids]
    return clean(advantages, mask).to(torch.float32), returns


ADV_ESTIMATORS: dict[str, AdvEstimator] = {
    "gae": gae_whitened,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "rloo": rloo,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "gpg": gpg,
    "optimal_token_baseline": optimal_token_baseline,
}
