"""Invalid or suspicious combinations of losses, estimators, KL terms, corrections and sampling.

Every loss runs with every estimator, KL term and aggregation; these are the exceptions. The settings of a plug-in's
function are known only after it is loaded. The driver (trainer/algorithm.py) checks them before it starts a process and
refuses settings of `algorithm` that the function does not read, typed or from a recipe. With a plug-in's estimator that
needs no values, `critic.*` and `trainer.critic_warmup` have no effect and give no error, because at that point a
recipe's value and a typed one look the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megarl.arch.layout import KEYS
from megarl.arch.megatron_fields import RECOMPUTED
from megarl.config import names
from megarl.config.schema import Config
from megarl.config.settings import show
from megarl.config.validate.models import supervised_lr
from megarl.plugins.declared import argument_faults


def contradictions(config: Config) -> Iterator[str]:
    """One sentence for each invalid combination."""
    yield from _policy_loss(config)
    yield from _estimator(config)
    yield from _kl(config)
    yield from _bypass(config)
    yield from _sampling(config)


def advice(config: Config) -> Iterator[str]:
    """One sentence for each combination that is allowed but probably not intended."""
    actor = config.actor
    algorithm = config.algorithm
    loss = config.algorithm.policy_loss_fn
    if config.rollout.quantization != "none" and algorithm.rollout_correction.level is None:
        differ = "log-probs of the quantized servers differ from the trainer's"
        how = "algorithm.rollout_correction.level=token corrects it"
        yield f"rollout.quantization={config.rollout.quantization}: {differ}; {how}"
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield "actor.use_kl_loss=true and algorithm.use_kl_in_reward=true: the KL penalty counts twice"
    if actor.use_kl_loss and actor.kl_loss_type in names.KL_WITHOUT_GRADIENT and not actor.kl_importance:
        wanted = f"{actor.kl_loss_type}+ or low_var_kl"
        yield f"actor.kl_loss_type={actor.kl_loss_type}: its expected gradient is zero; expected {wanted}"
    if actor.mtp != "off" and not config.drafts:
        how = "with SGLang on GPUs rollout.sglang.args=[--speculative-algorithm,NEXTN] makes them"
        yield f"actor.mtp={actor.mtp}: servers of this run do not draft with the trained layers; {how}"
    mode = names.AGG_MODE_OF_LOSS.get(loss)
    if mode is not None and actor.loss_agg_mode not in names.AGG_MODES_OF[mode]:
        given = f"actor.loss_agg_mode={actor.loss_agg_mode} with algorithm.policy_loss_fn={loss}"
        yield f"{given}: it was published with another; expected {mode}"


def idle(config: Config) -> Iterator[str]:
    """A line for clips whose ratio is always 1, for a rate that destroys a trained model, for a critic that learns more
    slowly than the policy, and for one that computes other parts of its layers again."""
    actor, algorithm = config.actor, config.algorithm
    is_one_step = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    has_ratio = algorithm.policy_loss_fn not in names.LOSSES_WITHOUT_RATIO
    teaches_alone = algorithm.adv_estimator == names.NO_ADVANTAGES and config.distill.form == "loss"
    # With bypass the ratio is that to the servers' policy, which is another one.
    if is_one_step and has_ratio and not teaches_alone and not algorithm.rollout_correction.bypass:
        yield (
            "one optimizer step an iteration (actor.ppo_epochs=1, actor.ppo_mini_batch_size="
            f"{actor.ppo_mini_batch_size} as data.train_batch_size): the ratio of new to old probabilities is 1, so no "
            "clip acts, and losses of the ratio have one gradient; actor.ppo_epochs=2 or a smaller "
            "actor.ppo_mini_batch_size gives them work"
        )
    usual = (supervised_lr(config) or math.inf) * (10 if actor.lora.rank else 1)
    if actor.optim.lr > 2 * usual and actor.optim.name == "adamw":
        yield (
            f"actor.optim.lr={actor.optim.lr:g}: for a model of this width even supervised training takes {usual:.1g}; "
            "one that was trained before is soon destroyed (docs/troubleshooting.md has a table of rates)"
        )
    if config.uses_critic and config.critic.optim.lr < actor.optim.lr:
        yield (
            f"critic.optim.lr={config.critic.optim.lr:g} is below actor.optim.lr={actor.optim.lr:g}, which it does not "
            "follow: the value head is new, and usually learns at 10 times the actor's rate"
        )
    modules, how = actor.megatron.override_transformer_config.get(RECOMPUTED), config.critic.megatron
    if config.uses_critic and modules and how.recompute_granularity != "selective":
        yield (
            f"critic.megatron.recompute_granularity={show(how.recompute_granularity)}: the actor's "
            f"{RECOMPUTED}={show(modules)} are not the critic's"
        )


def _policy_loss(config: Config) -> Iterator[str]:
    loss, given = config.algorithm.policy_loss_fn, config.algorithm.policy_loss_args
    if loss in names.POLICY_LOSSES:
        choice, shown = f"algorithm.policy_loss_fn={loss}", {name: show(value) for name, value in given.items()}
        yield from argument_faults(choice, "algorithm.policy_loss_args", names.POLICY_LOSS_ARGS[loss], shown)


def _estimator(config: Config) -> Iterator[str]:
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    if name in names.GROUP_ESTIMATORS and config.rollout.n == 1:
        yield f"rollout.n=1: algorithm.adv_estimator={name} compares completions of one prompt; expected at least 2"
    if name in names.ESTIMATORS_WITH_REWARD_WEIGHTS and not algorithm.reward_weights:
        wanted = "algorithm.reward_weights={NAME:WEIGHT,...}, the numbers of the reward function that it compares"
        yield f"algorithm.adv_estimator={name}: expected {wanted}"
    if name in names.ADV_ESTIMATORS:
        shown = {key: show(value) for key, value in algorithm.adv_estimator_args.items()}
        yield from argument_faults(f"algorithm.adv_estimator={name}", "algorithm.adv_estimator_args", {}, shown)


def _kl(config: Config) -> Iterator[str]:
    actor, algorithm = config.actor, config.algorithm
    if actor.use_kl_loss and actor.kl_importance and actor.kl_loss_type in names.FULL_KL:
        samples = f"actor.kl_loss_type={actor.kl_loss_type} is over all tokens, nothing is sampled; expected false"
        yield f"actor.kl_importance=true: {samples}"
    if algorithm.use_kl_in_reward and algorithm.kl_penalty.endswith("+"):
        value = algorithm.kl_penalty
        yield (
            f"algorithm.kl_penalty={value}: + shapes a gradient, a reward has none; expected {value.removesuffix('+')}"
        )
    if config.full_kl:
        yield from other_layout(config, config.full_kl)
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive" and algorithm.kl_ctrl.kl_coef == 0:
        yield (
            "algorithm.kl_ctrl.kl_coef=0: algorithm.kl_ctrl.type=adaptive only multiplies it; expected a number above 0"
        )


def other_layout(config: Config, full: str) -> Iterator[str]:
    """One sentence if the reference's layout differs from the actor's and the setting `full` needs the exact KL over
    the vocabulary."""
    why = "both models run on the same ranks for it; expected"
    for key in KEYS.values():
        theirs, ours = getattr(config.ref.megatron, key), getattr(config.actor.megatron, key)
        if key != KEYS["use_distributed_optimizer"] and theirs != ours:
            yield f"ref.megatron.{key}={show(theirs)} with {full}: {why} the layout of the actor"
            return
    for key in ("num_ranks", "first_rank", "strategy"):
        theirs, ours = getattr(config.ref, key), getattr(config.actor, key)
        if theirs != ours:
            yield f"ref.{key}={theirs} with {full}: {why} actor.{key}={ours}"
            return


def _bypass(config: Config) -> Iterator[str]:
    loss = config.algorithm.policy_loss_fn
    if loss in names.POLICY_LOSSES:
        uses_ratio, uses_old = loss not in names.LOSSES_WITHOUT_RATIO, loss not in names.LOSSES_WITHOUT_OLD
        yield from bypass_contradictions(config, uses_ratio=uses_ratio, uses_old=uses_old)


def bypass_contradictions(config: Config, *, uses_ratio: bool, uses_old: bool) -> Iterator[str]:
    """One sentence if the loss has no ratio for bypass, or if a correction weight would correct a second time."""
    how, loss = config.algorithm.rollout_correction, config.algorithm.policy_loss_fn
    if how.bypass and not uses_old:
        nothing = f"algorithm.policy_loss_fn={loss} has no ratio that it could change; expected false"
        yield f"algorithm.rollout_correction.bypass=true: {nothing}"
    elif how.bypass and how.level is not None and uses_ratio:
        twice = f"with bypass=true the ratio of {loss} corrects already; expected null"
        yield f"algorithm.rollout_correction.level={how.level}: {twice}"


def _sampling(config: Config) -> Iterator[str]:
    buffer, longest = config.algorithm.overlong_buffer, config.data.max_response_length
    if buffer.enable and (buffer.len is None or buffer.len > longest):
        yield f"algorithm.overlong_buffer.len={show(buffer.len)}: expected 1 to data.max_response_length={longest}"
    groups = config.algorithm.filter_groups
    if groups.enable and groups.metric in names.METRICS_OF_VERL:
        yield (
            f"algorithm.filter_groups.metric={groups.metric}: expected score, the reward before anything is added to it"
        )
    if groups.enable and config.rollout.n == 1:
        yield "algorithm.filter_groups.enable=true: a group of rollout.n=1 has nothing to compare; expected at least 2"
