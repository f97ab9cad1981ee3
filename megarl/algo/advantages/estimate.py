"""Computes advantages from a scored batch: rewards per token, KL in the reward, the estimator, the clamp.

Runs once per batch, on whole samples, on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.algo.advantages.groups import Groups
from megarl.algo.finite import require_finite, require_finite_row
from megarl.algo.hyperparameters import keyword_names
from megarl.algo.kl import kl_estimate
from megarl.algo.registry import ADV_ESTIMATORS
from megarl.algo.segments import clean, last_unmasked, segment_count, segment_mean, segment_sum
from megarl.plugins.declared import argument_faults
from megarl.samples.batch import Batch, Stat, Stats

# Inputs of an estimator that are not its own arguments: settings with their own keys, and data.
SETTINGS = ("gamma", "lam", "norm_adv_by_std_in_grpo", "reward_weights")
DATA = (
    *("values", "old_log_probs", "ref_log_probs", "rollout_log_probs", "sum_pi_squared", "full_kl", "keep"),
    *("group", "group_ids", "score", "raw_score", "greedy_score", "reward_parts", "truncated"),
    *("response_mask", "versions", "version_min", "version_max", "turn_rewards", "teacher_reward"),
)


def estimate(
    batch: Batch,
    *,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    reward_weights: Sequence[float] = (),
    adv_estimator_args: Mapping[str, Any] | None = None,
    use_kl_in_reward: bool = False,
    kl_penalty: str = "kl",
    kl_coef: float = 0.0,
    advantage_clip: float | None = None,
) -> tuple[Batch, Stats]:
    """Add token_level_rewards, advantages and returns to the batch.

    r_t = score_t - kl_coef KL_t m_t,   score_t on the last trainable token; of turn rewards, each on its turn's last
    A = adv_estimator(r, ...) + teacher_reward, clamped to [-advantage_clip, advantage_clip]

    teacher_reward is a reward of each token alone: it is discounted with 0, and compared with nothing.

    A sample of which rejection or a filter kept nothing (`keep`) does not count in its group: the baseline is of the
    samples that are trained, as a baseline of others would move the probability of what is kept as a whole.

    The tokens of a sample are those that it learns, row after row, or in the order of `turn` if there is this column.

    Args: batch: the column response_mask; for the KL old_log_probs and ref_log_probs, or full_kl; the estimator's
        inputs; per sequence score [B] and group [B]; optional: the columns turn_rewards, turn and teacher_reward.
        reward_weights: of the columns of reward_parts.  adv_estimator_args: further arguments of this estimator.
        kl_coef: the controller's current value.
    Returns: the batch, and statistics.  With KL in the reward, `actor/reward_kl_penalty` is the current KL, mean over
        sequences of token means: controller.update(stat.result(), int(stat.weight)).
    Raises: ValueError for an unknown name or a missing column; NonFiniteError for a number that is not finite.
    """
    check_estimator_args(adv_estimator, adv_estimator_args or {})
    mask, segment_ids = batch.columns["response_mask"] != 0, batch.segment_ids
    inputs = {name: c for name, c in batch.columns.items() if name in DATA and c.is_floating_point()}
    require_finite(inputs, mask, segment_ids)
    batch = batch.with_columns(**{name: clean(c, mask).float() for name, c in inputs.items()})

    timed, inverse = in_order_of_time(batch)
    mask, segment_ids = timed.columns["response_mask"] != 0, timed.segment_ids
    score, turn_rewards = timed.per_sequence["score"], timed.columns.get("turn_rewards")
    rewards, stats = score_rewards(score, mask, segment_ids, turn_rewards=turn_rewards)
    if use_kl_in_reward:
        penalty, kl_stats = kl_of_rewards(timed, mask, segment_ids, kl_penalty)
        rewards = rewards - kl_coef * penalty
        stats |= kl_stats | {"actor/reward_kl_penalty_coeff": Stat("mean", kl_coef)}

    settings: dict[str, Any] = {
        "gamma": gamma,
        "lam": lam,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
        "reward_weights": tuple(reward_weights),
        **(adv_estimator_args or {}),
    }
    asked = _asked_for(adv_estimator, timed, settings)
    if "group_ids" in asked:
        mask = mask & ~rejected_whole(timed, mask)
    advantages, returns = _per_token(adv_estimator, rewards, mask, segment_ids, asked)
    if "teacher_reward" in timed.columns:
        advantages = advantages + timed.columns["teacher_reward"]
    if advantage_clip is not None:
        advantages = advantages.clamp(-advantage_clip, advantage_clip)
    if "group_ids" in asked:
        has_token = segment_count(mask, segment_ids, batch.num_sequences) > 0
        stats |= group_stats(
            batch.per_sequence.get("raw_score", batch.per_sequence["score"]), Groups.of(asked["group_ids"], has_token)
        )
    columns = {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}
    columns = {name: column[inverse] for name, column in columns.items()}
    mask = batch.columns["response_mask"] != 0
    require_finite({name: columns[name] for name in ("advantages", "returns")}, mask, batch.segment_ids)
    return batch.with_columns(**{name: clean(column, mask).float() for name, column in columns.items()}), stats


def rejected_whole(batch: Batch, mask: Tensor) -> Tensor:
    """[N] bool: the tokens of samples of which no trainable token is kept; False without the column `keep`."""
    if "keep" not in batch.columns:
        return torch.zeros_like(mask)
    kept = segment_count(mask & (batch.columns["keep"] != 0), batch.segment_ids, batch.num_sequences)
    return (kept == 0)[batch.segment_ids]


def in_order_of_time(batch: Batch) -> tuple[Batch, Tensor]:
    """The same samples with their learnt tokens in the order of turns, and the indices [N] that undo this for a column.

    Rows of agents that take turns overlap in time: the turns 0, 2 of one and 1 of another.  Without the column `turn`
    no sample has such rows, and nothing moves.  Context comes first in its sample; the rows are joined to one.
    """
    if "turn" not in batch.columns:
        return batch, torch.arange(batch.num_tokens)
    by_turn = batch.columns["turn"].argsort(stable=True)
    order = by_turn[batch.segment_ids[by_turn].argsort(stable=True)]
    columns = {name: column[order] for name, column in batch.columns.items()}
    return Batch(batch.tokens[order], batch.sample_lengths, columns, batch.per_sequence), order.argsort()


def score_rewards(
    scores: Tensor, mask: Tensor, segment_ids: Tensor, *, turn_rewards: Tensor | None = None
) -> tuple[Tensor, Stats]:
    """scores [B] -> [N]: each on the last trainable token of its sequence, float32.

    With `turn_rewards` [N] these stay where they are, and only the rest of the score is put on the last token, float64:
    equal scores are then equal sums of token rewards too, which estimators compare.
    The score of a sequence without a trainable token is dropped; the statistic counts such sequences.
    """
    require_finite_row("score", scores)
    places = last_unmasked(mask, segment_ids, len(scores))
    has_place = places >= 0
    last = places[has_place]
    rewards = torch.zeros(len(mask), dtype=torch.float32, device=mask.device)
    if turn_rewards is not None:
        rewards = clean(turn_rewards, mask).double()
        rewards[last] = 0.0  # the last turn's own is a part of the rest
        scores = scores.double() - segment_sum(rewards, segment_ids, len(scores))
    rewards[last] += scores[has_place].to(rewards.dtype)
    return rewards, {"algorithm/sequences_without_trainable_token": Stat("sum", float((~has_place).sum()))}


def kl_of_rewards(batch: Batch, mask: Tensor, segment_ids: Tensor, kl_penalty: str) -> tuple[Tensor, Stats]:
    """KL_t of the policy at the start of the iteration, [N], and its mean over sequences of token means."""
    if kl_penalty.endswith("+"):
        raise ValueError(f'algorithm.kl_penalty={kl_penalty!r}: "+" shapes a gradient, a reward has none, leave it out')
    needs = ("full_kl",) if kl_penalty == "full" else ("old_log_probs", "ref_log_probs")
    for name in needs:
        if name not in batch.columns:
            raise ValueError(
                f"algorithm.use_kl_in_reward=true, kl_penalty={kl_penalty} needs the column {name}, "
                "which this batch has not"
            )
    columns = [batch.columns[name] for name in needs]
    penalty = clean(columns[0] if kl_penalty == "full" else kl_estimate(kl_penalty, *columns), mask)
    per_sequence = segment_mean(penalty, mask, segment_ids, batch.num_sequences)
    trainable = segment_count(mask, segment_ids, batch.num_sequences) > 0
    current = Stat("mean", float(per_sequence.double().sum()), float(trainable.sum()))
    return penalty, {"actor/reward_kl_penalty": current}


def group_stats(scores: Tensor, groups: Groups) -> Stats:
    """Groups without a learning signal: the number of groups of one, and the share of groups with equal rewards.

    Only samples with a trainable token count, and groups that have one.  scores [B]: from the reward function, before
    penalties, because a length or KL penalty makes samples differ even if their quality is equal.
    """
    sizes_G = segment_count(groups.takes_part, groups.index, groups.num_groups)
    differing_G = segment_count(groups.differ(scores), groups.index, groups.num_groups)
    equal = (sizes_G > 1) & (differing_G == 0)
    return {
        "algorithm/groups_of_one": Stat("sum", float((sizes_G == 1).sum())),
        "algorithm/groups_all_equal": Stat("mean", float(equal.sum()), float((sizes_G > 0).sum())),
    }


def check_estimator_args(adv_estimator: str, args: Mapping[str, Any]) -> None:
    """Raises: ValueError for an unknown estimator, and for an unknown or missing entry of algorithm.adv_estimator_args.

    Called before a run starts, without a batch.
    """
    if adv_estimator not in ADV_ESTIMATORS:
        raise ValueError(f"algorithm.adv_estimator={adv_estimator!r}: expected one of {', '.join(ADV_ESTIMATORS)}")
    asked = keyword_names(ADV_ESTIMATORS[adv_estimator])
    own = {name: has_default for name, has_default in asked.items() if name not in SETTINGS + DATA}
    for sentence in argument_faults(
        f"algorithm.adv_estimator={adv_estimator}", "algorithm.adv_estimator_args", own, args
    ):
        raise ValueError(sentence)


def _asked_for(adv_estimator: str, batch: Batch, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of this estimator, taken from the batch and the settings."""
    columns = {name: column for name, column in batch.columns.items() if name in DATA}
    offered = {**columns, **batch.per_sequence, "group_ids": batch.per_sequence.get("group"), **settings}
    asked = {}
    for name, has_default in keyword_names(ADV_ESTIMATORS[adv_estimator]).items():
        if offered.get(name) is not None:
            asked[name] = offered[name]
        elif not has_default:
            raise ValueError(f"algorithm.adv_estimator={adv_estimator} needs {name}, which this batch has not")
        if name in batch.per_sequence:
            require_finite_row(name, batch.per_sequence[name])
    return asked


def _per_token(
    adv_estimator: str, rewards: Tensor, mask: Tensor, segment_ids: Tensor, asked: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, as [N] columns."""
    advantages, returns = ADV_ESTIMATORS[adv_estimator](rewards, mask, segment_ids, **asked)
    for name, column in {"advantages": advantages, "returns": returns}.items():
        if column.shape != mask.shape:
            raise ValueError(
                f"algorithm.adv_estimator={adv_estimator}: {name} need one number a token, {tuple(mask.shape)}"
            )
    return advantages, returns
