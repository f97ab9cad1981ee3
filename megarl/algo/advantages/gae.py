"""Discounted returns and generalized advantage estimation (GAE) over the trainable tokens, and whitening.

A masked token (the prompt, a tool's output) is not a step of the decision process: it has no discount, and later
returns pass through it to the previous step.  A reward on a masked token moves to the last trainable token before it;
without such a token no decision led to the reward and it is dropped.  A sample of several rows is one such process:
rows follow each other in the order of time, so after the last trainable token of a row comes the first one of the next;
where turns of several rows alternate, `estimate` puts the tokens into the order of the turns before.
Computed in float64, returned as the type of `rewards`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algo.segments import clean, masked_moments, previous_unmasked


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, segment_ids: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the trainable tokens.

    delta_t = r_t + gamma V_{t'} - V_t,   A_t = delta_t + gamma lam A_{t'},   R_t = A_t + V_t

    t' is the next trainable token of the sequence; V and A are 0 after the last.  Paper: arXiv:1506.02438.

    Args: rewards, values [N], V_t being the value before token t is chosen; mask [N] bool; segment_ids [N].
    Returns: advantages [N], not whitened, and returns [N]; 0 at masked places.
    """
    steps = mask.nonzero().squeeze(1)  # S trainable tokens, in order
    segment_S = segment_ids[steps]
    reward_S = _rewards_of_steps(rewards, mask, segment_ids)[steps].double()
    value_S = values[steps].double()
    goes_on_S = torch.zeros_like(value_S)
    goes_on_S[:-1] = (segment_S[1:] == segment_S[:-1]).to(value_S.dtype)
    next_value_S = goes_on_S * value_S.roll(-1)
    delta_S = reward_S + gamma * next_value_S - value_S
    longest = int(segment_S.bincount().max()) if len(steps) else 0
    advantage_S = _discounted_suffix_sums(delta_S, gamma * lam * goes_on_S, longest)
    zeros = torch.zeros_like(rewards)
    advantages = zeros.index_put((steps,), advantage_S.to(rewards.dtype))
    return advantages, zeros.index_put((steps,), (advantage_S + value_S).to(rewards.dtype))


def returns_to_go(rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t'}, t' the next trainable token of the sequence, [N]; 0 at masked places."""
    return gae(rewards, torch.zeros_like(rewards), mask, segment_ids, gamma=gamma, lam=1.0)[0]


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the unmasked entries, 0 elsewhere; unchanged if fewer than 2.

    Args: x [N]; mask [N] bool.  The variance is unbiased; both moments are taken in float64.
    """
    mean, variance, count = masked_moments(x, mask)
    if count < 2:
        return clean(x, mask)
    wide = clean(x, mask).double()
    return torch.where(mask, (wide - mean) * (variance + 1e-8).rsqrt(), 0.0).to(x.dtype)


def _rewards_of_steps(rewards: Tensor, mask: Tensor, segment_ids: Tensor) -> Tensor:
    """[N]: rewards with those on masked tokens moved to the last trainable token before them."""
    target = previous_unmasked(mask, segment_ids)
    kept = target >= 0
    return torch.zeros_like(rewards).index_add(0, target[kept], rewards[kept])


def _discounted_suffix_sums(x: Tensor, factor: Tensor, longest: int) -> Tensor:
    """y_t = x_t + factor_t y_{t+1} for all t at once; factor is 0 at the last step of each sequence.

    Pointer doubling: after k rounds y_t holds the terms t .. t + 2^k - 1 and factor_t the product over them, so a batch
    takes log2(longest) passes over its flat steps instead of a Python step per token.
    """
    y, factor = x.clone(), factor.clone()
    reach = 1
    while reach < longest:
        y[:-reach] += factor[:-reach] * y[reach:]
        factor[:-reach] = factor[:-reach] * factor[reach:]
        reach *= 2
    return y
