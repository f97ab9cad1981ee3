"""The loss layer: pure tensor functions of packed [T] columns and segment ids.

Contains losses, KL estimators, advantage estimators, aggregation, and their statistics.  Does not use logits, models,
ranks, files or the configuration.  Imports torch and nothing heavier.
Called by the driver with whole batches (`overlong_penalty`, `estimate`, `correct`, `step_columns`), and by the ranks
with packed micro-batches (`ActorLoss`, `CriticLoss`, `PairLoss`).

Tables of choices (registry.py), filled by a decorator on each function: POLICY_LOSSES, ADV_ESTIMATORS, KL_ESTIMATORS,
AGG_MODES.  README.md has a row for each entry; `megarl/plugins/declared.py` reads the decorators for the configuration.
"""

from megarl.algo.advantages.estimate import check_estimator_args, estimate
from megarl.algo.aggregate import token_weights
from megarl.algo.correction import Correction, correct, leave_out_old
from megarl.algo.finite import NonFiniteError
from megarl.algo.kl import KL_CONTROLLERS, AdaptiveKL, FixedKL, kl_estimate, make_kl_controller
from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.algo.pairs import PairLoss
from megarl.algo.registry import (
    ADV_ESTIMATORS,
    AGG_MODES,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    register_adv_est,
    register_kl,
    register_policy_loss,
)
from megarl.algo.reward_shaping import overlong_filter, overlong_penalty
from megarl.algo.step_columns import step_columns
from megarl.plugins.load import load_plugins

__all__ = [
    "ADV_ESTIMATORS",
    "AGG_MODES",
    "KL_CONTROLLERS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "ActorLoss",
    "AdaptiveKL",
    "Correction",
    "CriticLoss",
    "FixedKL",
    "NonFiniteError",
    "PairLoss",
    "check_estimator_args",
    "correct",
    "estimate",
    "kl_estimate",
    "leave_out_old",
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
