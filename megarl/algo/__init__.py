"""The loss layer: pure tensor functions of packed [T] columns and segment ids.

Knows: losses, KL estimators, advantage estimators, aggregation, and the statistics of these.
Knows not: logits, models, ranks, files, the configuration.  Imports torch and nothing heavier.
Called by: the driver, with whole batches (`overlong_penalty`, `estimate`, `correct`, `step_columns`), and by the ranks,
with packed micro-batches (`ActorLoss`, `CriticLoss`).

The tables of choices, each a dict literal in its file that `register_*` extends:

    POLICY_LOSSES   algorithm.policy_loss_fn                   ppo (vanilla, grpo)  reinforce  gpg  gspo
                                                               gmpo (geo_mean)  cispo  sapo  dppo_tv  dppo_kl  dro
                                                               clip_cov  kl_cov
    KL_ESTIMATORS   actor.kl_loss_type, algorithm.kl_penalty   kl (k1)  mse (k2)  low_var_kl (k3)  abs, each with "+";
                                                               and "full", a column of the model
    ADV_ESTIMATORS  algorithm.adv_estimator                    gae  grpo  grpo_passk  gdpo  rloo  remax
                                                               reinforce_plus_plus  reinforce_plus_plus_baseline  opo
                                                               gpg  optimal_token_baseline
    AGG_MODES       actor.loss_agg_mode                        token-mean (token_level)  token-sum  seq-mean-token-sum
                                                               seq-mean-token-mean (sample_level)  token-sum-norm
                                                               seq-mean-token-sum-norm  prompt-mean-token-mean
    KL_CONTROLLERS  algorithm.kl_ctrl.type                     fixed  adaptive

and what is said of a policy loss beside its function: SELECTIONS, WITHOUT_RATIO, PER_SEQUENCE, SEQ_MEAN_WANTED.
"""

from megarl.algo.advantages.estimate import check_estimator_args, estimate
from megarl.algo.advantages.table import ADV_ESTIMATORS
from megarl.algo.aggregate import AGG_MODES, token_weights
from megarl.algo.correction import Correction, correct
from megarl.algo.finite import NonFiniteError
from megarl.algo.kl import KL_CONTROLLERS, KL_ESTIMATORS, AdaptiveKL, FixedKL, kl_estimate, make_kl_controller
from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.algo.losses.table import PER_SEQUENCE, POLICY_LOSSES, SELECTIONS, SEQ_MEAN_WANTED, WITHOUT_RATIO
from megarl.algo.registry import register_adv_est, register_kl, register_policy_loss
from megarl.algo.reward_shaping import is_informative, overlong_filter, overlong_penalty
from megarl.algo.step_columns import step_columns
from megarl.plugins import load_plugins

__all__ = [
    "ADV_ESTIMATORS",
    "AGG_MODES",
    "KL_CONTROLLERS",
    "KL_ESTIMATORS",
    "PER_SEQUENCE",
    "POLICY_LOSSES",
    "SELECTIONS",
    "SEQ_MEAN_WANTED",
    "WITHOUT_RATIO",
    "ActorLoss",
    "AdaptiveKL",
    "Correction",
    "CriticLoss",
    "FixedKL",
    "NonFiniteError",
    "check_estimator_args",
    "correct",
    "estimate",
    "is_informative",
    "kl_estimate",
    "load_plugins",
    "make_kl_controller",
    "overlong_filter",
    "overlong_penalty",
    "register_adv_est",
    "register_kl",
    "register_policy_loss",
    "step_columns",
    "token_weights",
]
