"""Keys of losses, advantage estimators, KL, rollout correction and filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config import names
from megarl.config.schema.record import (
    BASIC,
    RL_EVALUATE,
    Bound,
    Choices,
    Count,
    Factor,
    Finite,
    If,
    NotNegative,
    Positive,
    SomeWeights,
    Unit,
    Weights,
    key,
)

READ = If("the estimator reads it")
LOSS = If("there is a policy loss")
WEIGHT = If("there is a policy loss", ".level != null")
KL = If(".use_kl_in_reward == true")
REJECTS = If(".reject_by != null")
ENABLED = If(".enable == true")
REFILLS = If(".enable == true", ".refill == true")


@dataclass
class KLControl:
    type: str = key("fixed", "whether the weight of the KL penalty stays or adapts", Choices(names.KL_CONTROLLERS))
    kl_coef: NotNegative = key(0.001, "weight of the KL penalty in the reward, at the start")
    horizon: Count = key(
        10000, "the weight changes by at most a fifth over this many sequences", If(".type == adaptive")
    )
    target_kl: Positive = key(0.1, "target KL of the controller", If(".type == adaptive"))


@dataclass
class RolloutCorrection:
    level: str | None = key(
        None, "level of the weight trainer / server; null = no weight", Choices(names.CORRECTION_LEVELS), LOSS
    )
    truncate: Bound | None = key(2.0, "upper bound of the weight; null = not truncated", WEIGHT)
    mask_low: Unit | None = key(None, "a weight below this becomes 0; null = not masked", WEIGHT)
    mask_high: Factor | None = key(None, "a weight above this becomes 0; null = not masked", WEIGHT)
    normalize: bool = key(False, "scale weights to mean 1 over an optimizer step, after truncation and masking", WEIGHT)
    reject_by: str | None = key(None, "measure by which tokens are rejected; null = none", Choices(names.REJECT_BY))
    reject_level: str = key("token", "what is measured, and what is rejected", Choices(names.REJECT_LEVELS), REJECTS)
    reject_low: Finite | None = key(None, "reject what is below this; null = no bound", REJECTS)
    reject_high: Finite | None = key(None, "reject what is above this; null = no bound", REJECTS)
    bypass: bool = key(
        False, "the ratio of the loss uses the server's log-probs, not the trainer's old log-probs", LOSS
    )


@dataclass
class FilterGroups:
    enable: bool = key(False, "drop groups whose completions all have the same metric: they give no learning signal")
    metric: str = key("score", "score (the reward), or the name of another number that the reward returns", ENABLED)
    refill: bool = key(
        True, "generate for more prompts until data.train_batch_size groups are kept; false = use the rest", ENABLED
    )
    max_num_gen_batches: Count = key(
        10, "generation batches per iteration at most; if they are not enough, the run stops", REFILLS
    )


@dataclass
class OverlongBuffer:
    enable: bool = key(False, "lower the score of completions whose length is close to data.max_response_length")
    len: Count | None = key(None, "the penalty grows from 0 to penalty_factor over this many last tokens", ENABLED)
    penalty_factor: Positive = key(1.0, "penalty at data.max_response_length", ENABLED)


@dataclass
class Algorithm:
    policy_loss_fn: str = key("ppo", "policy loss", Choices(names.POLICY_LOSSES, is_open=True), BASIC)
    policy_loss_args: Weights = key({}, "settings of the loss other than actor.clip_ratio*")
    adv_estimator: str = key("gae", "advantage estimator", Choices(names.ADV_ESTIMATORS, is_open=True), BASIC)
    adv_estimator_args: dict[str, Any] = key({}, "further values for a plug-in's estimator")
    gamma: Unit = key(1.0, "discount per token", READ)
    lam: Unit = key(1.0, "lambda of GAE: 0 trusts the critic, 1 trusts the rewards", READ)
    norm_adv_by_std_in_grpo: bool = key(True, "divide by the standard deviation of the group; false = Dr.GRPO", READ)
    reward_weights: SomeWeights = key(
        {}, "name -> weight of each number that a reward function returns; `reward` is the reward itself", READ
    )
    advantage_clip: Positive | None = key(
        None, "advantages are clamped to [-this, this]; null = not clamped", If("there are advantages")
    )
    use_kl_in_reward: bool = key(False, "subtract kl_coef * KL(policy, reference) from every token's reward")
    kl_penalty: str = key("kl", "estimator of the KL in the reward", Choices(names.KL_PENALTIES, is_open=True), KL)
    kl_ctrl: KLControl = key(KLControl, "weight of the KL in the reward", KL)
    rollout_correction: RolloutCorrection = key(
        RolloutCorrection, "correction of the difference between the servers' policy and the trainer's"
    )
    filter_groups: FilterGroups = key(FilterGroups, "dynamic sampling")
    overlong_buffer: OverlongBuffer = key(OverlongBuffer, "penalty of long completions")
    overlong_filtering: bool = key(
        False, "remove completions cut by the length limit from the loss and its denominators"
    )
    plugins: list[str] = key([], "modules or files that register losses, estimators, KLs, rewards", RL_EVALUATE)
