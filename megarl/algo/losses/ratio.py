"""Shared by the policy losses: the importance ratio, and the checks of clip ranges."""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: finite in float32 even when squared and multiplied by an advantage


class HyperparameterError(ValueError):
    """An invalid hyperparameter; the message has the loss's own name for it."""


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """The importance ratio r = exp(clamp(l - l_old, -20, 20)), [T]; beyond the limits its gradient is 0."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def require_ratio_clips(clip_low: float, clip_high: float) -> None:
    """Raises: HyperparameterError unless 1 - clip_low and 1 + clip_high are valid bounds of a ratio."""
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise HyperparameterError(
            f"clip_low={clip_low}, clip_high={clip_high}: expected 0 <= clip_low <= 1 and 0 <= clip_high"
        )


def require_distances(clip_low: float, clip_high: float) -> None:
    """Raises: HyperparameterError if a bound of a distance is below 0."""
    if not (clip_low >= 0 and clip_high >= 0):
        raise HyperparameterError(f"clip_low={clip_low}, clip_high={clip_high}: expected numbers that are not below 0")


def require_positive(**hyperparameters: float) -> None:
    """Raises: HyperparameterError for the first of these that is not above 0."""
    for name, value in hyperparameters.items():
        if not value > 0:
            raise HyperparameterError(f"{name}={value}: expected a number above 0")
