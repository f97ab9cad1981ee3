"""How rewards become advantages and a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class KLControl:
    type: str = "fixed"  # fixed | adaptive
    kl_coef: float = 0.001  # weight of the KL penalty in the reward, at the start
    horizon: int = 10000  # adaptive: over so many sequences the weight changes by a fifth at most
    target_kl: float = 0.1  # adaptive: the KL it steers to


@dataclass
class RolloutCorrection:
    level: str | None = None  # token | sequence | geometric: where (trainer / server) becomes a weight; null = nowhere
    truncate: float | None = 2.0  # the weight is at most this; null = not
    mask_low: float | None = None  # the weight is 0 where it is below this; null = not masked
    mask_high: float | None = None  # and above this
    normalize: bool = False  # weights to mean 1 over an optimizer step, after all cuts
    reject_by: str | None = None  # ratio | k1 | k2 | k3: what is measured to take tokens out of a step; null = nothing
    reject_level: str = "token"  # token | sequence: whose measure it is, and what is taken out
    reject_low: float | None = None  # taken out below this; null = no bound
    reject_high: float | None = None  # and above this
    bypass: bool = False  # the loss's own ratio is against the server's log-probs rather than the trainer's old ones


@dataclass
class FilterGroups:
    enable: bool = False  # drop groups whose completions all have the same metric: they teach nothing
    metric: str = "score"  # score (the reward), or the name of a further number of the reward function
    refill: bool = True  # ask for more prompts until data.train_batch_size groups are there; false = train on the rest
    max_num_gen_batches: int = 10  # generation batches of one iteration; if they do not fill it, the run stops


@dataclass
class OverlongBuffer:
    enable: bool = False  # lower the score of completions that come near data.max_response_length
    len: int | None = None  # over so many last tokens the penalty grows from 0 ...
    penalty_factor: float = 1.0  # ... to this


@dataclass
class Algorithm:
    policy_loss_fn: str = "ppo"  # the policy loss
    policy_loss_args: dict[str, float] = field(default_factory=dict)  # its own numbers, beside the clips of the actor
    adv_estimator: str = "gae"  # how rewards become advantages
    adv_estimator_args: dict[str, Any] = field(default_factory=dict)  # further values for a plug-in's estimator
    gamma: float = 1.0  # discount per token
    lam: float = 1.0  # gae: 0 trusts the critic, 1 trusts the rewards
    norm_adv_by_std_in_grpo: bool = True  # grpo: divide by the group's standard deviation; false = Dr.GRPO
    reward_weights: dict[str, float] = field(  # gdpo: name -> weight, of the numbers that the reward function returns;
        default_factory=dict  # the name `reward` stands for the reward itself
    )
    advantage_clip: float | None = None  # advantages are clamped to this size; null = not
    use_kl_in_reward: bool = False  # subtract kl_coef * KL(policy, reference) from every token's reward
    kl_penalty: str = "kl"  # its estimator
    kl_ctrl: KLControl = field(default_factory=KLControl)
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    overlong_buffer: OverlongBuffer = field(default_factory=OverlongBuffer)
    overlong_filtering: bool = False  # completions that the length limit ended teach nothing, and are counted nowhere
    plugins: list[str] = field(default_factory=list)  # modules or files that register losses, estimators, KLs, rewards
