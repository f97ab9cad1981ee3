"""Advantage estimators that compare the samples of a prompt; all trainable tokens of a sample get the same number.

R is the sum of a sample's token rewards, g its prompt group; groups.py defines which samples count.  The return is R.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.algo.advantages.gae import whiten
from megarl.algo.advantages.groups import Groups, on_tokens, samples_of
from megarl.algo.registry import register_adv_est

Estimate = tuple[Tensor, Tensor]  # advantages [N], returns [N]


@register_adv_est("grpo")
def grpo(
    rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, group_ids: Tensor, norm_adv_by_std_in_grpo: bool
) -> Estimate:
    """Reward relative to the mean of the answers to the same prompt.

    A = (R - mean_g) / (std_g + 1e-6);   norm_adv_by_std_in_grpo=False: A = R - mean_g

    Papers: GRPO, arXiv:2402.03300; without the std, Dr.GRPO, arXiv:2503.20783.

    When: no critic; right-or-wrong rewards.

    Args: rewards [N]; mask [N] bool; segment_ids [N]; group_ids [B].
    Returns: advantages, returns [N].
    """
    R, groups = samples_of(rewards, mask, segment_ids, group_ids)
    A = relative(R, groups, by_std=norm_adv_by_std_in_grpo)
    return on_tokens(A, mask, segment_ids), on_tokens(R, mask, segment_ids)


@register_adv_est("grpo_passk")
def grpo_passk(
    rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, group_ids: Tensor, norm_adv_by_std_in_grpo: bool
) -> Estimate:
    """Only the best sample of a group is reinforced, by its lead over the best reward of the group without it.

    A = R_max - R_second [/ (std_g + 1e-6)] for the best sample, 0 for the others

    If several samples share the highest reward, R_second equals R_max and all get 0.  Paper: arXiv:2503.19595.

    When: the goal is pass@k, at least one correct answer in k.

    Args: rewards [N]; mask [N] bool; segment_ids [N]; group_ids [B].
    Returns: advantages, returns [N].
    """
    R, groups = samples_of(rewards, mask, segment_ids, group_ids)
    best = groups.compares & (groups.highest(R) == R)
    alone = best & (groups.total(best.double()) == 1)
    A = torch.where(alone, R - groups.without(alone).highest(R), 0.0)
    if norm_adv_by_std_in_grpo:
        A = A / (groups.std(R) + 1e-6)
    return on_tokens(A, mask, segment_ids), on_tokens(R, mask, segment_ids)


@register_adv_est("gdpo")
def gdpo(
    rewards: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    group_ids: Tensor,
    norm_adv_by_std_in_grpo: bool,
    reward_parts: Tensor,
    reward_weights: Sequence[float],
    score: Tensor,
    raw_score: Tensor | None = None,
) -> Estimate:
    """Several rewards, each normalised in its group before they are added, so that none dominates the others.

    A = whiten(sum_k weight_k grpo(part_k) + (X - mean_g X)),   X = R - the reward as the reward function gave it

    X is everything added to the reward: the KL in the reward and the overlong penalty.  It is centred and not divided
    by its std, because then its coefficient would cancel.  A sample without another sample to compare with gets 0 and
    does not count in the whitening.
    Paper: arXiv:2601.05242.

    When: several rewards on different scales.

    Args: rewards [N]; mask [N] bool; segment_ids [N]; group_ids [B]; reward_parts [B, K]; reward_weights: K numbers;
        score [B] as included in `rewards`; raw_score [B] before shaping (None: it was not shaped).
    Returns: advantages, returns [N].
    """
    if reward_parts.dim() != 2 or len(reward_weights) != reward_parts.shape[1] or not len(reward_weights):
        raise ValueError(
            f"algorithm.reward_weights has {len(reward_weights)} weights and reward_parts the shape "
            f"{tuple(reward_parts.shape)}: adv_estimator=gdpo needs one weight for each column"
        )
    R, groups = samples_of(rewards, mask, segment_ids, group_ids)
    A = groups.centred(R - (score if raw_score is None else raw_score).double())
    for part, weight in zip(reward_parts.unbind(1), reward_weights, strict=True):
        A = A + weight * relative(part, groups, by_std=norm_adv_by_std_in_grpo)
    return _whitened(A, groups, mask, segment_ids), on_tokens(R, mask, segment_ids)


@register_adv_est("rloo")
def rloo(rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, group_ids: Tensor) -> Estimate:
    """Leave-one-out baseline: reward relative to the mean of the other answers.

    A = n / (n - 1) (R - mean_g),   n = size of the group

    Paper: arXiv:2402.14740.

    When: no critic; unbiased, because there is no division by a standard deviation.

    Args: rewards [N]; mask [N] bool; segment_ids [N]; group_ids [B].
    Returns: advantages, returns [N].
    """
    R, groups = samples_of(rewards, mask, segment_ids, group_ids)
    n = groups.size
    A = n / (n - 1).clamp(min=1) * groups.centred(R)
    return on_tokens(A, mask, segment_ids), on_tokens(R, mask, segment_ids)


@register_adv_est("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, group_ids: Tensor) -> Estimate:
    """Reward relative to the group's mean, whitened over the whole batch.

    A = whiten(R - mean_g)

    A sample without another sample to compare with gets 0 and does not count in the whitening.
    Paper: arXiv:2501.03262.

    When: prompt groups with the same scale of advantages over the whole batch.

    Args: rewards [N]; mask [N] bool; segment_ids [N]; group_ids [B].
    Returns: advantages, returns [N].
    """
    R, groups = samples_of(rewards, mask, segment_ids, group_ids)
    return _whitened(groups.centred(R), groups, mask, segment_ids), on_tokens(R, mask, segment_ids)


@register_adv_est("opo")
def opo(rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, group_ids: Tensor) -> Estimate:
    """Reward relative to the group's length-weighted mean: the baseline of minimum variance.

    A = R - sum_g(n R) / sum_g(n),   n = trainable tokens of a sample

    Paper: arXiv:2505.23585.

    When: strictly on-policy training with answers of very different lengths.

    Args: rewards [N]; mask [N] bool; segment_ids [N]; group_ids [B].
    Returns: advantages, returns [N].
    """
    R, groups = samples_of(rewards, mask, segment_ids, group_ids)
    n = torch.zeros_like(R).index_add(0, segment_ids, mask.double())
    A = torch.where(groups.compares, R - groups.total(n * R) / groups.total(n), 0.0)
    return on_tokens(A, mask, segment_ids), on_tokens(R, mask, segment_ids)


@register_adv_est("gpg")
def gpg(rewards: Tensor, mask: Tensor, segment_ids: Tensor, *, group_ids: Tensor) -> Estimate:
    """Reward relative to the group's mean, scaled up to compensate for groups whose rewards are all equal.

    A = alpha (R - mean_g),   alpha = samples / samples in groups with unequal rewards, 1 if there is none

    Paper: arXiv:2504.02546.

    When: many groups have equal rewards, which give no learning signal.

    Args: rewards [N]; mask [N] bool; segment_ids [N]; group_ids [B].
    Returns: advantages, returns [N].
    """
    R, groups = samples_of(rewards, mask, segment_ids, group_ids)
    unequal = int(groups.differ(R).sum())
    alpha = int(groups.takes_part.sum()) / unequal if unequal else 1.0
    return on_tokens(alpha * groups.centred(R), mask, segment_ids), on_tokens(R, mask, segment_ids)


def relative(x: Tensor, groups: Groups, *, by_std: bool) -> Tensor:
    """(x - mean_g) / (std_g + 1e-6), or x - mean_g, [B] float64."""
    centred = groups.centred(x)
    return centred / (groups.std(x) + 1e-6) if by_std else centred


def _whitened(A: Tensor, groups: Groups, mask: Tensor, segment_ids: Tensor) -> Tensor:
    """A [B] -> [N] float32, whitened over the trainable tokens of samples with another sample to compare with."""
    return whiten(A[segment_ids], mask & groups.compares[segment_ids]).float()
