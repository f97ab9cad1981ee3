"""The policy losses: functions of packed [T] columns that return one loss a token.

None of them aggregates: the weight of a token is data (aggregate.py).  None adds entropy or KL: loss.py does, the same
way for all.  A function gets columns whose masked places hold 0, and what it returns there is thrown away.

    f(log_probs, old_log_probs, advantages, mask, segment_ids, *, hyperparameters) -> (token loss [T], {statistic: [T]})

Its keyword-only arguments are its hyperparameters, whose defaults are its own: clip_low, clip_high and clip_c come from
`actor.clip_ratio*`, all others from `algorithm.policy_loss_args`.  Two names are no hyperparameters but columns of the
step: see COLUMN_KEYWORDS.  Adding one: `@register_policy_loss("name")`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megarl.algo.losses.clipped import gmpo, gspo, ppo
from megarl.algo.losses.covariance import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from megarl.algo.losses.weighted import cispo, dppo_kl, dppo_tv, dro, gpg, reinforce, sapo

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
Selection = Callable[..., Tensor]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "vanilla": ppo,
    "grpo": ppo,  # GRPO's loss is PPO's; what differs is the estimator
    "reinforce": reinforce,
    "gpg": gpg,
    "gspo": gspo,
    "gmpo": gmpo,
    "geo_mean": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}

# f(old_log_probs, advantages, mask, *, generator, hyperparameters) -> [N] bool: which tokens of a whole optimizer step
# the loss treats otherwise; made before the step is split, so that no split changes it.
SELECTIONS: dict[str, Selection] = {"clip_cov": select_clip_cov, "kl_cov": select_kl_cov}

COLUMN_KEYWORDS: tuple[str, ...] = (
    "selected",
    "rollout_log_probs",
)  # keywords of a loss that are columns, no hyperparameters
WITHOUT_RATIO: set[str] = {"reinforce", "gpg", "dro"}  # their gradient has no importance ratio
PER_SEQUENCE: set[str] = {"gspo", "gmpo", "geo_mean"}  # a weight of rollout correction is one number a sequence
SEQ_MEAN_WANTED: set[str] = {"gspo", "gmpo", "geo_mean"}  # made for loss_agg_mode=seq-mean-token-mean
