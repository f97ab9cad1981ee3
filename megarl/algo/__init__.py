"""The loss layer: pure tensor functions of packed [T] columns and segment ids.

Knows: losses, KL estimators, advantage estimators, aggregation, and the statistics of these.
Knows not: logits, models, ranks, files, the configuration.  Imports torch and nothing heavier.
Called by: the driver, with whole batches (`estimate`, `token_weights`, a KL controller), and by the ranks, with packed
micro-batches (`ActorLoss`, `CriticLoss`).

The tables of choices, each a dict literal in its file that `register_*` extends:

    POLICY_LOSSES   algorithm.policy_loss_fn                   ppo (vanilla, grpo)  reinforce
    KL_ESTIMATORS   actor.kl_loss_type, algorithm.kl_penalty   kl (k1)  mse (k2)  low_var_kl (k3)  abs, each with "+"
    ADV_ESTIMATORS  algorithm.adv_estimator                    gae  grpo
    AGG_MODES       actor.loss_agg_mode                        token-mean (token_level)  token-sum  seq-mean-token-sum
                                                               seq-mean-token-mean (sample_level)  token-sum-norm
                                                               seq-mean-token-sum-norm  prompt-mean-token-mean
    KL_CONTROLLERS  algorithm.kl_ctrl.type                     fixed  adaptive
"""

from megarl.algo.advantages import ADV_ESTIMATORS
from megarl.algo.aggregate import AGG_MODES, token_weights
from megarl.algo.estimate import estimate
from megarl.algo.finite import NonFiniteError
from megarl.algo.kl import KL_CONTROLLERS, KL_ESTIMATORS, AdaptiveKL, FixedKL, kl_estimate, make_kl_controller
from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.algo.policy import POLICY_LOSSES
from megarl.algo.registry import load_plugins, register_adv_est, register_kl, register_policy_loss

__all__ = [
    "ADV_ESTIMATORS",
    "AGG_MODES",
    "KL_CONTROLLERS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "ActorLoss",
    "AdaptiveKL",
    "CriticLoss",
    "FixedKL",
    "NonFiniteError",
    "estimate",
    "kl_estimate",
    "load_plugins",
    "make_kl_controller",
    "register_adv_est",
    "register_kl",
    "register_policy_loss",
    "token_weights",
]
