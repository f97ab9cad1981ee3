"""Whether the old log-probs of an iteration need a forward pass of their own.

The first optimizer step of an iteration is at the weights with which the iteration began, so its forward pass computes
the old log-probs of its samples too; only those of further mini-batches need another pass, before it.  Until then some
are lacking: what reads them earlier needs the pass over the whole batch.
"""

from __future__ import annotations

from collections.abc import Collection

from megarl.config.names import LOSSES_WITH_SELECTION, POLICY_COLUMNS, READ_BY_ESTIMATOR
from megarl.config.schema import Config


def why_own_pass(
    config: Config, *, estimator_reads: Collection[str] | None = None, loss_selects: bool | None = None
) -> str | None:
    """Why each iteration needs the pass, as a sentence; None: the first optimizer step gives the old log-probs.

    `estimator_reads`: the names of the data that the estimator takes; `loss_selects`: whether the policy loss selects
    tokens of a whole step.  None: as the built-in ones do; a plug-in's are then taken to need no pass.
    """
    algorithm, correction = config.algorithm, config.algorithm.rollout_correction
    if estimator_reads is None:
        estimator_reads = READ_BY_ESTIMATOR.get(algorithm.adv_estimator, ())
    if loss_selects is None:
        loss_selects = algorithm.policy_loss_fn in LOSSES_WITH_SELECTION
    read = [name for name in POLICY_COLUMNS if name in estimator_reads]
    reasons = (
        (bool(read), f"algorithm.adv_estimator={algorithm.adv_estimator} reads {' and '.join(read)}"),
        (algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward=true compares them with the reference's"),
        (correction.level is not None, f"algorithm.rollout_correction.level={correction.level} makes weights of them"),
        (
            correction.reject_by is not None,
            f"algorithm.rollout_correction.reject_by={correction.reject_by} rejects by them",
        ),
        (loss_selects, f"algorithm.policy_loss_fn={algorithm.policy_loss_fn} selects tokens of a whole step by them"),
        (config.actor.router_replay == "old", "actor.router_replay=old replays the experts of this pass"),
        (
            bool(config.teachers) and config.distill.form == "reward",
            "distill.form=reward compares them with the teachers'",
        ),
    )
    return next((sentence for holds, sentence in reasons if holds), None)


def pass_share(config: Config) -> float:
    """The share of an iteration's samples in a pass for old log-probs alone; a plug-in is taken to need no pass."""
    if why_own_pass(config) is not None or config.actor.old_log_prob_freq == 1:
        return 1.0
    return 1 - config.actor.ppo_mini_batch_size / config.data.train_batch_size


def source_of_old_log_probs(config: Config, why: str | None) -> str:
    """A line that says where they come from.  `why`: what `why_own_pass` says."""
    every, share = config.actor.old_log_prob_freq, pass_share(config)
    if every == 1:
        why = why or "actor.old_log_prob_freq=1 asks for it"
    if why is not None:
        return f"old log-probs: of a forward pass of their own, because {why}"
    rest = f" and of one over the other {share:.0%} of the samples" if share else ""
    checked = f"checked by a pass of their own every {every} iterations" if every else "never checked"
    return f"old log-probs: of the forward pass of the first optimizer step{rest}, {checked} (actor.old_log_prob_freq)"
