"""The algorithm of a run as plain values: estimator, loss, corrections, filters and the KL controller.

Made from the configuration before any process starts, after the plug-ins are loaded.  The signatures of estimators and
losses show which data they need; settings that contradict these needs are refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megarl.algo.advantages.estimate import check_estimator_args
from megarl.algo.correction import Correction
from megarl.algo.distillation import Distillation
from megarl.algo.hyperparameters import keyword_names
from megarl.algo.kl import FULL, AdaptiveKL, FixedKL, kl_estimate, make_kl_controller
from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.algo.registry import ADV_ESTIMATORS, POLICY_LOSSES
from megarl.algo.rehearsal import rehearse
from megarl.algo.reward_shaping import overlong_filter, overlong_penalty
from megarl.arch.routed_experts import ROUTED_EXPERTS
from megarl.config import Config, names, schema
from megarl.config.old_log_probs import why_own_pass
from megarl.config.settings import show
from megarl.config.validate.algorithms import bypass_contradictions, other_layout
from megarl.config.validate.models import config_of_folder
from megarl.roles.settings import Update
from megarl.rollout.group_filter import Filter
from megarl.samples.batch import Batch, Stat, Stats

REFERENCE = "ref"  # the role of the reference
# Keys of the `algorithm` group, and the arguments through which an estimator reads them.
READERS = {
    "gamma": {"gamma"},
    "lam": {"lam"},
    "norm_adv_by_std_in_grpo": {"norm_adv_by_std_in_grpo"},
    "reward_weights": {"reward_weights", "reward_parts"},
}
Shaping = Callable[[Batch], tuple[Batch, Stats]]


@dataclass(frozen=True)
class Algorithm:
    """Example: algorithm = make_algorithm(config); estimate(batch, kl_coef=0.001, **algorithm.advantages)."""

    actor: Update
    critic: Update | None  # None: the estimator does not use values
    advantages: Mapping[str, Any]  # arguments of estimate(), except the KL coefficient, which the controller sets
    correction: Correction
    max_age: int | None  # of a token that counts, in pushes
    shaping: tuple[Shaping, ...]
    columns: tuple[str, ...]  # computed by the actor's forward pass before the first optimizer step, where it makes one
    why_own_pass: str | None  # why every iteration makes that pass; None: the first optimizer step gives old log-probs
    old_log_prob_freq: int  # iterations between such passes all the same; 0: none is made
    reads_reference: bool  # the estimator, the KL penalty or the loss uses the reference's log-probs
    wants_greedy: bool  # the estimator uses the reward of a greedy completion of each prompt
    reward_parts: tuple[str, ...]  # components of the reward that the estimator gets separately
    keep: Filter | None  # of dynamic sampling
    kl: FixedKL | AdaptiveKL  # controller of the coefficient of the KL in the reward: the only mutable field
    critic_warmup: int  # first steps, in which only the critic is trained
    shuffle_rewards: bool  # the control experiment
    seed: int

    @property
    def reference(self) -> str | None:
        """The role with which the actor's first pass computes a KL over the whole vocabulary; None: no such KL."""
        return REFERENCE if "full_kl" in self.columns else None

    def old_log_prob_share(self, step: int, num_prompts: int) -> float:
        """The share of the samples in a forward pass for old log-probs, in an iteration counted from 0, of so many
        groups: all, or those that the first optimizer step leaves out, because it gives the others."""
        is_due = self.old_log_prob_freq > 0 and step % self.old_log_prob_freq == 0
        if self.why_own_pass is not None or is_due or step < self.critic_warmup:  # then there is no step
            return 1.0
        return max(0.0, 1 - self.actor.prompts_per_step / num_prompts)

    def shape(self, batch: Batch, seed: int) -> tuple[Batch, Stats]:
        """Shuffle the rewards in the control experiment; apply the penalty and the filter of overlong completions."""
        stats: Stats = {}
        if self.shuffle_rewards:
            batch = shuffle_rewards(batch, seed)
        for shaping in self.shaping:
            batch, found = shaping(batch)
            stats |= found
        return batch, stats

    def update_kl(self, stats: Stats) -> None:
        """Update the controller of the KL coefficient with the KL penalty of a step."""
        current: Stat | None = stats.get("actor/reward_kl_penalty")
        if current is not None:
            self.kl.update(current.result(), int(current.weight))


def shuffle_rewards(batch: Batch, seed: int) -> Batch:
    """The control experiment: the same rewards, assigned to random samples; those of turns only in their sum."""
    order = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(seed))
    batch = replace(batch, columns={name: c for name, c in batch.columns.items() if name != "turn_rewards"})
    return batch.with_per_sequence(
        **{name: batch.per_sequence[name][order] for name in ("score", "reward_parts") if name in batch.per_sequence}
    )


def make_algorithm(config: Config) -> Algorithm:
    """Raises ValueError, one sentence, for settings that the loss layer refuses."""
    algorithm = config.algorithm
    actor, reads = actor_update(config), _read_by_advantages(config)
    learns_values = "values" in reads
    kl = algorithm.kl_ctrl
    groups = algorithm.filter_groups
    asked = keyword_names(ADV_ESTIMATORS[algorithm.adv_estimator])
    return Algorithm(
        actor=actor,
        critic=_update(config.critic, CriticLoss(config.critic.cliprange_value)) if learns_values else None,
        advantages=_advantages(config),
        correction=Correction(**vars(algorithm.rollout_correction)),
        max_age=config.rollout.max_age,
        shaping=_shaping(config),
        columns=_first_pass(config, reads),
        why_own_pass=why_own_pass(
            config,
            estimator_reads=asked,
            loss_selects=POLICY_LOSSES[algorithm.policy_loss_fn].select is not None,
        ),
        old_log_prob_freq=config.actor.old_log_prob_freq,
        reads_reference="ref_log_probs" in reads | set(actor.loss.columns),
        wants_greedy="greedy_score" in reads,
        reward_parts=tuple(algorithm.reward_weights) if "reward_parts" in asked else (),
        keep=Filter(groups.metric, groups.refill, groups.max_num_gen_batches) if groups.enable else None,
        kl=make_kl_controller(kl.type, kl_coef=kl.kl_coef, target_kl=kl.target_kl, horizon=kl.horizon),
        critic_warmup=config.trainer.critic_warmup if learns_values else 0,
        shuffle_rewards=config.reward.shuffle,
        seed=config.trainer.seed,
    )


def _first_pass(config: Config, reads: set[str]) -> tuple[str, ...]:
    """What the actor's pass before the first optimizer step computes."""
    experts = (ROUTED_EXPERTS,) if config.actor.router_replay == "old" else ()
    return ("log_probs", *(name for name in ("sum_pi_squared", "full_kl") if name in reads), *experts)


def _read_by_advantages(config: Config) -> set[str]:
    """Names of the data that the estimator and the KL in the reward require."""
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    check_estimator_args(name, algorithm.adv_estimator_args)
    asked = keyword_names(ADV_ESTIMATORS[name])
    reads = {keyword for keyword, has_default in asked.items() if not has_default}
    _require_readers(config, set(asked))
    _require_data(config, reads)
    if algorithm.use_kl_in_reward:
        _rehearse_kl(algorithm.kl_penalty)
        reads.add("full_kl" if algorithm.kl_penalty == FULL else "ref_log_probs")
    return reads


def _require_readers(config: Config, asked: set[str]) -> None:
    """Raises: ValueError for a setting that a plug-in's estimator does not read; the schema checks built-in estimators.

    Any value other than the default is refused, whether it comes from a recipe or from the command line.
    """
    algorithm, usual = config.algorithm, schema.Algorithm()
    if algorithm.adv_estimator in names.ADV_ESTIMATORS:
        return
    for key, readers in READERS.items():
        value, default = getattr(algorithm, key), getattr(usual, key)
        if value != default and not asked & readers:
            why = f"has no effect, because algorithm.adv_estimator={algorithm.adv_estimator} does not ask for it"
            raise ValueError(f"algorithm.{key}={show(value)}: {why}; expected {show(default)}")


def _require_data(config: Config, reads: set[str]) -> None:
    """Raises: ValueError for data that the estimator requires and that these settings do not produce."""
    algorithm, choice = config.algorithm, f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    reference = "actor.use_kl_loss=true or algorithm.use_kl_in_reward=true, else there is no reference"
    conditions = {
        "full_kl": (config.uses_reference, reference),
        "ref_log_probs": (config.uses_reference, reference),
        "reward_parts": (
            bool(algorithm.reward_weights),
            "algorithm.reward_weights={NAME:WEIGHT,...}, the numbers of the reward function that it gets",
        ),
        "raw_score": (algorithm.overlong_buffer.enable, "algorithm.overlong_buffer.enable=true, else it is the score"),
        "keep": (algorithm.overlong_filtering, "algorithm.overlong_filtering=true, else nothing is taken out"),
    }
    for name in sorted(reads & conditions.keys()):
        is_made, wanted = conditions[name]
        if not is_made:
            raise ValueError(f"{choice} reads {name}: expected {wanted}")
    if "full_kl" in reads:
        for sentence in other_layout(config, choice):
            raise ValueError(sentence)


def _rehearse_kl(name: str) -> None:
    """Raises: ValueError for a KL estimator that is unknown or that does not return one value per token."""
    if name == FULL:
        return
    try:
        kl_estimate(name, torch.zeros(2), torch.zeros(2))
    except ValueError as error:
        raise ValueError(f"algorithm.kl_penalty={name}: {error}") from None


def _advantages(config: Config) -> dict[str, Any]:
    algorithm = config.algorithm
    same = ("adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo", "use_kl_in_reward", "kl_penalty")
    return {
        **{name: getattr(algorithm, name) for name in (*same, "advantage_clip")},
        "adv_estimator_args": dict(algorithm.adv_estimator_args),
        "reward_weights": tuple(algorithm.reward_weights.values()),
    }


def _shaping(config: Config) -> tuple[Shaping, ...]:
    buffer, longest = config.algorithm.overlong_buffer, config.data.max_response_length
    out: list[Shaping] = []
    if buffer.enable:
        assert buffer.len is not None, "the configuration needs a length"
        limits = partial(overlong_penalty, max_response_length=longest, buffer_length=buffer.len)
        out.append(partial(limits, factor=buffer.penalty_factor))
    if config.algorithm.overlong_filtering:
        out.append(overlong_filter)
    return tuple(out)


def actor_update(config: Config) -> Update:
    """The policy's update from the configuration.  Raises ValueError for contradictory settings."""
    actor, algorithm = config.actor, config.algorithm
    loss = ActorLoss(
        policy_loss=algorithm.policy_loss_fn,
        clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
        args=dict(algorithm.policy_loss_args),
        entropy_coeff=actor.entropy_coeff,
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,
        kl_loss_type=actor.kl_loss_type,
        kl_importance=actor.kl_importance and actor.use_kl_loss,  # a recipe may set it without the KL
        use_rollout_weight=algorithm.rollout_correction.level is not None,
        distillation=_distillation(config),
        mtp_coef=actor.mtp_coef,
    )
    rehearse(loss)
    loss.require_agg_mode(actor.loss_agg_mode)
    how, entry = algorithm.rollout_correction, POLICY_LOSSES[loss.policy_loss]
    for sentence in bypass_contradictions(config, uses_ratio=entry.uses_ratio, uses_old=entry.uses_old):
        raise ValueError(sentence)
    return replace(
        _update(actor, loss),
        normalize=how.normalize,
        bypass=how.bypass,
        reference=REFERENCE if "full_kl" in loss.outputs else None,
    )


def _distillation(config: Config) -> Distillation | None:
    how = config.distill
    if not config.teachers or how.form != "loss":
        return None
    return Distillation(how.divergence, how.beta, how.top_k is not None, tuple(config.teachers))


def _update(role: Any, loss: ActorLoss | CriticLoss) -> Update:
    return Update(
        loss=loss,
        prompts_per_step=role.ppo_mini_batch_size,
        epochs=role.ppo_epochs,
        agg_mode=role.loss_agg_mode,
        loss_scale_factor=role.loss_scale_factor,
    )


def check_vocabularies(policy: str, reference: str, config: Config) -> None:
    """Raises ValueError if the models of two folders have different vocabulary sizes, so that no full KL exists."""
    ours, theirs = (config_of_folder(f)["vocab_size"] for f in (policy, reference))
    if ours != theirs:
        compared = f"a full KL compares them token for token with the {ours} of model.path={config.model.path}"
        raise ValueError(
            f"ref.model.path={config.ref.model.path}: its vocabulary has {theirs} tokens, and {compared}; "
            "expected a model with the same vocabulary"
        )
