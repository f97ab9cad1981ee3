"""From a scored batch to advantages: rewards per token, KL in the reward, the estimator, the clamp.

Runs once per batch, on whole samples, on the CPU.  Knows columns and settings; not where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.algo.advantages import ADV_ESTIMATORS
from megarl.algo.finite import require_finite
from megarl.algo.kl import kl_estimate
from megarl.algo.registry import keyword_names
from megarl.algo.segments import clean, last_unmasked, segment_count, segment_mean, segment_sum
from megarl.sample import Batch, Stat, Stats


def estimate(
    batch: Batch,
    *,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    use_kl_in_reward: bool = False,
    kl_penalty: str = "kl",
    kl_coef: float = 0.0,
    advantage_clip: float | None = None,
) -> tuple[Batch, Stats]:
    """Put token_level_rewards, advantages and returns into the batch.

    r_t = score_t - kl_coef KL_t m_t,   score_t on the last trainable token
    A = adv_estimator(r, ...) clamped to [-advantage_clip, advantage_clip]

    Args: batch: columns response_mask, and what the settings ask for: old_log_probs and ref_log_probs for the KL,
        values for gae; rows score [B] and group [B].  kl_coef: the controller's current value.
    Returns: the batch, and statistics.  With KL in the reward, `actor/reward_kl_penalty` is the current KL, mean over
        sequences of token means: controller.update(stat.result(), int(stat.weight)).
    Raises: ValueError for an unknown name or a missing column; NonFiniteError for a number that is not finite.
    """
    mask, segment_ids = batch.columns["response_mask"] != 0, batch.segment_ids
    inputs = {name: c for name, c in batch.columns.items() if c.is_floating_point()}
    require_finite(inputs, mask, segment_ids)
    batch = batch.with_columns(**{name: clean(c, mask).float() for name, c in inputs.items()})

    rewards, stats = score_rewards(batch.rows["score"], mask, segment_ids)
    if use_kl_in_reward:
        penalty, kl_stats = kl_of_rewards(batch, mask, segment_ids, kl_penalty)
        rewards = rewards - kl_coef * penalty
        stats |= kl_stats | {"actor/reward_kl_penalty_coeff": Stat("mean", kl_coef)}

    settings = {"gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    offered = {**settings, **batch.columns, **batch.rows, "group_ids": batch.rows.get("group")}
    asked = _asked_for(adv_estimator, offered)
    advantages, returns = ADV_ESTIMATORS[adv_estimator](rewards, mask, segment_ids, **asked)
    for name, column in {"advantages": advantages, "returns": returns}.items():
        if column.shape != mask.shape:
            raise ValueError(
                f"algorithm.adv_estimator={adv_estimator}: {name} want one number a token, {tuple(mask.shape)}"
            )
    if advantage_clip is not None:
        advantages = advantages.clamp(-advantage_clip, advantage_clip)
    if "group_ids" in asked:
        stats |= group_stats(segment_sum(rewards, segment_ids, batch.num_sequences), batch.rows["group"])
    require_finite({"advantages": advantages, "returns": returns}, mask, segment_ids)
    columns = {"token_level_rewards": rewards, "advantages": clean(advantages, mask), "returns": clean(returns, mask)}
    return batch.with_columns(**columns), stats


def score_rewards(scores: Tensor, mask: Tensor, segment_ids: Tensor) -> tuple[Tensor, Stats]:
    """scores [B] -> [N] float32: each on the last trainable token of its sequence.

    A sequence without a trainable token has no place for its score; the statistic counts those.
    """
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        raise ValueError(f"score of sequence {int(bad[0])} is {float(scores[bad[0]])}: want a finite number")
    places = last_unmasked(mask, segment_ids, len(scores))
    has_place = places >= 0
    rewards = torch.zeros(len(mask), dtype=torch.float32, device=mask.device)
    rewards[places[has_place]] = scores[has_place].to(rewards.dtype)
    return rewards, {"algorithm/sequences_without_trainable_token": Stat("sum", float((~has_place).sum()))}


def kl_of_rewards(batch: Batch, mask: Tensor, segment_ids: Tensor, kl_penalty: str) -> tuple[Tensor, Stats]:
    """KL_t of the policy at the start of the iteration, [N], and its mean over sequences of token means."""
    if kl_penalty.endswith("+"):
        raise ValueError(f'algorithm.kl_penalty={kl_penalty!r}: "+" shapes a gradient, a reward has none, leave it out')
    for name in ("old_log_probs", "ref_log_probs"):
        if name not in batch.columns:
            raise ValueError(f"algorithm.use_kl_in_reward=true needs the column {name}, which this batch has not")
    penalty = clean(kl_estimate(kl_penalty, batch.columns["old_log_probs"], batch.columns["ref_log_probs"]), mask)
    per_sequence = segment_mean(penalty, mask, segment_ids, batch.num_sequences)
    trainable = segment_count(mask, segment_ids, batch.num_sequences) > 0
    current = Stat("mean", float(per_sequence.double().sum()), float(trainable.sum()))
    return penalty, {"actor/reward_kl_penalty": current}


def group_stats(scores: Tensor, group_ids: Tensor) -> Stats:
    """What a group estimator cannot learn from: groups of one, and the share of groups whose rewards are all equal."""
    groups, group_B, sizes_G = group_ids.unique(return_inverse=True, return_counts=True)
    lowest = torch.full((len(groups),), torch.inf).scatter_reduce(0, group_B, scores.float(), "amin")
    highest = torch.full((len(groups),), -torch.inf).scatter_reduce(0, group_B, scores.float(), "amax")
    equal = (lowest == highest) & (sizes_G > 1)
    return {
        "algorithm/groups_of_one": Stat("sum", float((sizes_G == 1).sum())),
        "algorithm/groups_all_equal": Stat("mean", float(equal.sum()), float(len(groups))),
    }


def _asked_for(adv_estimator: str, offered: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of this estimator, out of what the batch and the settings offer."""
    if adv_estimator not in ADV_ESTIMATORS:
        raise ValueError(f"algorithm.adv_estimator={adv_estimator!r}: want one of {', '.join(ADV_ESTIMATORS)}")
    asked = {}
    for name, has_default in keyword_names(ADV_ESTIMATORS[adv_estimator]).items():
        if offered.get(name) is not None:
            asked[name] = offered[name]
        elif not has_default:
            raise ValueError(f"algorithm.adv_estimator={adv_estimator} needs {name}, which this batch has not")
    return asked
