"""Keys of losses, advantage estimators, KL, rollout correction and filters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class KLControl:
    type: str = "fixed"  # fixed | adaptive
    kl_coef: float = 0.001  # weight of the KL penalty in the reward, at the start
    horizon: int = 10000  # adaptive: over this many sequences the weight changes by at most a fifth
    target_kl: float = 0.1  # adaptive: the target KL of the controller


@dataclass
class RolloutCorrection:
    level: str | None = None  # token | sequence | geometric: level of the weight trainer / server; null = no weight
    truncate: float | None = 2.0  # upper bound of the weight; null = not truncated
    mask_low: float | None = None  # a weight below this becomes 0; null = not masked
    mask_high: float | None = None  # a weight above this becomes 0; null = not masked
    normalize: bool = False  # scale weights to mean 1 over an optimizer step, after truncation and masking
    reject_by: str | None = None  # ratio | k1 | k2 | k3: the measure by which tokens are rejected; null = none
    reject_level: str = "token"  # token | sequence: what is measured, and what is rejected
    reject_low: float | None = None  # rejected below this; null = no bound
    reject_high: float | None = None  # rejected above this; null = no bound
    bypass: bool = False  # the ratio of the loss uses the server's log-probs, not the trainer's old log-probs


@dataclass
class FilterGroups:
    enable: bool = False  # drop groups whose completions all have the same metric: they give no learning signal
    metric: str = "score"  # score (the reward), or the name of another number that the reward function returns
    refill: bool = True  # generate for more prompts until data.train_batch_size groups are kept; false = use the rest
    max_num_gen_batches: int = 10  # limit of generation batches per iteration; if they are not enough, the run stops


@dataclass
class OverlongBuffer:
    enable: bool = False  # lower the score of completions whose length is close to data.max_response_length
    len: int | None = None  # over this many last tokens the penalty grows from 0 to penalty_factor
    penalty_factor: float = 1.0  # the penalty at data.max_response_length


@dataclass
class Algorithm:
    policy_loss_fn: str = "ppo"  # the policy loss
    policy_loss_args: dict[str, float] = field(default_factory=dict)  # the loss's settings other than actor.clip_ratio*
    adv_estimator: str = "gae"  # the advantage estimator
    adv_estimator_args: dict[str, Any] = field(default_factory=dict)  # further values for a plug-in's estimator
    gamma: float = 1.0  # discount per token
    lam: float = 1.0  # gae: 0 trusts the critic, 1 trusts the rewards
    norm_adv_by_std_in_grpo: bool = True  # grpo: divide by the group's standard deviation; false = Dr.GRPO
    reward_weights: dict[str, float] = field(  # gdpo: name -> weight of each number that the reward function returns;
        default_factory=dict  # the name `reward` is the reward itself
    )
    advantage_clip: float | None = None  # advantages are clamped to [-this, this]; null = not clamped
    use_kl_in_reward: bool = False  # subtract kl_coef * KL(policy, reference) from every token's reward
    kl_penalty: str = "kl"  # its estimator
    kl_ctrl: KLControl = field(default_factory=KLControl)
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    overlong_buffer: OverlongBuffer = field(default_factory=OverlongBuffer)
    overlong_filtering: bool = False  # remove completions cut by the length limit from the loss and its denominators
    plugins: list[str] = field(default_factory=list)  # modules or files that register losses, estimators, KLs, rewards
