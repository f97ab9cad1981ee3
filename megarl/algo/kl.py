"""Estimators of KL(policy || reference) from sampled tokens, and the controllers of its coefficient in the reward.

x = l - l_ref.  An estimator is a function (log_probs [T], ref_log_probs [T]) -> [T], differentiable in log_probs.
Value and gradient are separate questions: k1's value is unbiased, but its expected gradient is zero; k2's gradient is
that of the reverse KL, but its value is not the KL (arXiv:2506.09477).
A name with "+" has the estimator's value and k2's gradient.

"full" is not an estimator but the exact KL, sum_v p(v) (log p(v) - log q(v)): the column `full_kl`, computed by the
model from its logits and the reference's.  Callers read this column instead of calling an estimator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.registry import FULL, KL_ESTIMATORS, register_kl

# exp(d) - d - 1 = 10 at d = LINEAR_FROM; its slope there is exp(d) - 1 = 10 + d.
LINEAR_FROM = 2.610868638149876


@register_kl("kl", "k1", zero_gradient=True)
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """x.  Unbiased, may be negative; as a loss its expected gradient is zero.

    When: in the reward, or as `kl+`.
    """
    return log_probs - ref_log_probs


@register_kl("mse", "k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """x^2 / 2.  As a loss on-policy: the gradient of the reverse KL.

    When: in the loss.
    """
    return 0.5 * (log_probs - ref_log_probs).square()


@register_kl("low_var_kl", "k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(-x) + x - 1, linear above 10, so that the value stays finite and the gradient never vanishes.

    As a loss on-policy: the gradient of the forward KL(reference || policy).

    When: in the loss; never negative, low variance.
    """
    d = ref_log_probs - log_probs  # -x
    steep = d > LINEAR_FROM
    inside = torch.where(steep, 0.0, d)  # before expm1: exp(90) would be inf, and inf * 0 in the gradient NaN
    return torch.where(steep, 10 + (10 + LINEAR_FROM) * (d - LINEAR_FROM), torch.expm1(inside) - inside)


@register_kl("low_var_kl_clamped", "k3_clamped")
def k3_clamped(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(-x) + x - 1, at most 10: no gradient where the reference is over 13 times likelier, farthest from it.

    When: to repeat the numbers of a run of verl, slime or NeMo-RL.
    """
    d = (ref_log_probs - log_probs).clamp(max=LINEAR_FROM)
    return torch.expm1(d) - d


@register_kl("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|x|.  As a loss on-policy: the gradient of twice the total variation.

    When: to bound outliers.
    """
    return (log_probs - ref_log_probs).abs()


def kl_estimate(name: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The estimator of that name, [T]; with "+": its value, the gradient of k2.

    Args: log_probs, ref_log_probs [T], masked places already 0.
    Raises: ValueError for an unknown name, or an estimator that does not return one number per token.
    """
    base = name.removesuffix("+")
    if base not in KL_ESTIMATORS:
        names = ", ".join([*KL_ESTIMATORS, FULL])
        raise ValueError(f'KL estimator {name!r}: expected one of {names}, or one of these with "+"')
    value = KL_ESTIMATORS[base](log_probs, ref_log_probs)
    if value.shape != log_probs.shape:
        raise ValueError(
            f"KL estimator {base}: it returns shape {tuple(value.shape)}, expected one number a token, "
            f"{tuple(log_probs.shape)}"
        )
    return value if base == name else with_gradient_of_k2(value, log_probs, ref_log_probs)


def with_gradient_of_k2(value: Tensor, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """sg(value) + (k2 - sg(k2)), [T]: straight-through."""
    straight = k2(log_probs, ref_log_probs)
    return value.detach() + (straight - straight.detach())


@dataclass
class FixedKL:
    """A constant coefficient: it is a setting, so it is not part of a checkpoint."""

    value: float

    def update(self, kl: float, num_sequences: int) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, float]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The configured coefficient wins."""


@dataclass
class AdaptiveKL:
    """A coefficient that is adapted to bring the KL to `target_kl`.

    beta *= 1 + clip(KL / target - 1, -0.2, 0.2) n / horizon

    Paper: Ziegler et al., arXiv:1909.08593, section 2.2.
    """

    value: float
    target_kl: float = 0.1
    horizon: float = 10000.0

    def __post_init__(self) -> None:
        if not (self.target_kl > 0 and self.horizon > 0):
            raise ValueError(
                f"algorithm.kl_ctrl.target_kl={self.target_kl}, horizon={self.horizon}: expected numbers above 0"
            )

    def update(self, kl: float, num_sequences: int) -> None:
        """Call after the coefficient was used. kl: mean over sequences of token means; num_sequences: their number."""
        error = min(max(kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * num_sequences / self.horizon

    def state_dict(self) -> dict[str, float]:
        """The current coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A checkpoint of a run with a fixed coefficient has no value: then the configured coefficient is kept."""
        self.value = state.get("value", self.value)


KL_CONTROLLERS: tuple[str, ...] = ("fixed", "adaptive")


def make_kl_controller(
    kind: str, *, kl_coef: float, target_kl: float = 0.1, horizon: float = 10000.0
) -> FixedKL | AdaptiveKL:
    """The controller of `algorithm.kl_ctrl`.  Raises: ValueError for an unknown type."""
    if kind == "fixed":
        return FixedKL(kl_coef)
    if kind == "adaptive":
        return AdaptiveKL(kl_coef, target_kl, horizon)
    raise ValueError(f"algorithm.kl_ctrl.type={kind!r}: expected one of {', '.join(KL_CONTROLLERS)}")
