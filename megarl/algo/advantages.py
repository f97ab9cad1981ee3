"""Advantage estimators: once per batch, on whole samples.

An estimator is a function of packed columns, f(rewards [N], mask [N], segment_ids [N], *, ...), that returns
(advantages [N], returns [N]).  Its keyword-only arguments are what it asks for, by name: any other column of the batch,
`group_ids` and other rows [B], or a setting of estimate.py.  Masked tokens are no steps of the decision process.
`advantages` is 0 at masked places.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algo.segments import (
    clean,
    masked_moments,
    previous_unmasked,
    segment_count,
    segment_sum,
)

AdvEstimator = Callable[..., tuple[Tensor, Tensor]]


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the unmasked entries, 0 elsewhere; unchanged if fewer than 2.

    Args: x [N]; mask [N] bool.  The variance is unbiased; both moments are taken in float64.
    """
    mean, variance, count = masked_moments(x, mask)
    if count < 2:
        return clean(x, mask)
    wide = clean(x, mask).double()
    return torch.where(mask, (wide - mean) * (variance + 1e-8).rsqrt(), 0.0).to(x.dtype)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, segment_ids: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the trainable tokens.

    delta_t = r_t + gamma V_{t'} - V_t,   A_t = delta_t + gamma lam A_{t'},   R_t = A_t + V_t

    t' is the next trainable token of the sequence; V and A are 0 after the last.  A masked token is no step, and a
    reward on it moves to the last trainable token before it (with none before it, no choice led to it: it is dropped).
    Paper: arXiv:1506.02438.

    Args: rewards, values [N], V_t being the value before token t is chosen; mask [N] bool; segment_ids [N].
    Returns: advantages [N], not whitened, and returns [N]; 0 at masked places.
    """
    steps = mask.nonzero().squeeze(1)  # S trainable tokens, in order
    segment_S = segment_ids[steps]
    reward_S = _rewards_of_steps(rewards, mask, segment_ids)[steps]
    value_S = values[steps]
    goes_on_S = torch.zeros_like(value_S)
    goes_on_S[:-1] = (segment_S[1:] == segment_S[:-1]).to(value_S.dtype)
    next_value_S = goes_on_S * value_S.roll(-1)
    delta_S = reward_S + gamma * next_value_S - value_S
    longest = int(segment_S.bincount().max()) if len(steps) else 0
    advantage_S = _discounted_suffix_sums(delta_S, gamma * lam * goes_on_S, longest)
    zeros = torch.zeros_like(rewards)
    return zeros.index_put((steps,), advantage_S), zeros.index_put((steps,), advantage_S + value_S)


def grpo(scores: Tensor, group_ids: Tensor, *, norm_by_std: bool = True, takes_part: Tensor | None = None) -> Tensor:
    """One advantage a sample, relative to the other answers to its prompt.

    (R - mean_g) / (std_g + 1e-6); without the std for Dr.GRPO

    Groups may differ in size; std is unbiased; a group of one is its own mean and gives 0.
    Papers: GRPO, arXiv:2402.03300; Dr.GRPO, arXiv:2503.20783.

    Args: scores [B]; group_ids [B]; takes_part [B] bool: samples that count (default all), the rest get 0.
    Returns: [B].
    """
    if takes_part is None:
        takes_part = torch.ones_like(scores, dtype=torch.bool)
    groups, group_B = group_ids.unique(return_inverse=True)
    size_G = segment_count(takes_part, group_B, len(groups))
    # float64: three equal float32 rewards must have exactly their mean, or std + 1e-6 would blow the rounding up
    score_B = clean(scores, takes_part).double()
    mean_G = segment_sum(score_B, group_B, len(groups)) / size_G.clamp(min=1)
    centred_B = torch.where(takes_part, score_B - mean_G[group_B], 0.0)
    advantage_B = centred_B
    if norm_by_std:
        variance_G = segment_sum(centred_B.square(), group_B, len(groups)) / (size_G - 1).clamp(min=1)
        advantage_B = centred_B / (variance_G.sqrt()[group_B] + 1e-6)
    return advantage_B.to(scores.dtype)


def gae_estimator(
    rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, values: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """gae, whitened over the batch; the returns are those before whitening."""
    advantages, returns = gae(rewards, values, mask, segment_ids, gamma=gamma, lam=lam)
    return whiten(advantages, mask), returns


def grpo_estimator(
    rewards: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    group_ids: Tensor,
    norm_adv_by_std_in_grpo: bool,
) -> tuple[Tensor, Tensor]:
    """grpo of R, the sum of a sample's rewards, on each of its trainable tokens; the return is R itself.

    A sample without a trainable token tells nothing about the policy and is left out of its group.
    """
    num_sequences = len(group_ids)
    scores = segment_sum(rewards, segment_ids, num_sequences)
    trainable = segment_count(mask, segment_ids, num_sequences) > 0
    advantage_B = grpo(scores, group_ids, norm_by_std=norm_adv_by_std_in_grpo, takes_part=trainable)
    return clean(advantage_B[segment_ids], mask), clean(scores[segment_ids], mask)


ADV_ESTIMATORS: dict[str, AdvEstimator] = {
    "gae": gae_estimator,
    "grpo": grpo_estimator,
}


def _rewards_of_steps(rewards: Tensor, mask: Tensor, segment_ids: Tensor) -> Tensor:
    """[N]: rewards with those on masked tokens moved to the last trainable token before them."""
    target = previous_unmasked(mask, segment_ids)
    kept = target >= 0
    return torch.zeros_like(rewards).index_add(0, target[kept], rewards[kept])


def _discounted_suffix_sums(x: Tensor, factor: Tensor, longest: int) -> Tensor:
    """y_t = x_t + factor_t y_{t+1} for all t at once; factor is 0 at the last step of each sequence.

    Pointer doubling: after k rounds y_t holds the terms t .. t + 2^k - 1 and factor_t the product over them, so a batch
    takes log2(longest) passes over its flat steps instead of one Python step per token.
    """
    y, factor = x.clone(), factor.clone()
    reach = 1
    while reach < longest:
        y[:-reach] += factor[:-reach] * y[reach:]
        factor[:-reach] = factor[:-reach] * factor[reach:]
        reach *= 2
    return y
