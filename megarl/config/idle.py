"""Settings that cannot act as they stand: lines at the start of a run, where nothing is wrong and little is learnt."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import names
from megarl.config.schema import Config
from megarl.config.settings import show
from megarl.megatron_fields import RECOMPUTED


def idle(config: Config) -> Iterator[str]:
    """A line for clips whose ratio is always 1, for a critic that learns more slowly than the policy, and for one that
    computes other parts of its layers again."""
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
