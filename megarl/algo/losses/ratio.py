"""What the policy losses have in common: the importance ratio, and which clips have a meaning."""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: finite in float32 even when squared and multiplied by an advantage


class HyperparameterError(ValueError):
    """A hyperparameter without meaning; the sentence has the loss's own name for it."""


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """r = exp(clamp(l - l_old, -20, 20)), [T]; beyond the limits its gradient is 0."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def require_ratio_clips(clip_low: float, clip_high: float) -> None:
    """1 - clip_low and 1 + clip_high bound a ratio.  Raises: HyperparameterError where they cannot."""
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise HyperparameterError(
            f"clip_low={clip_low}, clip_high={clip_high}: expected 0 <= clip_low <= 1 and 0 <= clip_high"
        )


def require_distances(clip_low: float, clip_high: float) -> None:
    """Both bound a distance.  Raises: HyperparameterError where one is below 0."""
    if not (clip_low >= 0 and clip_high >= 0):
        raise HyperparameterError(f"clip_low={clip_low}, clip_high={clip_high}: expected numbers that are not below 0")


def require_positive(**hyperparameters: float) -> None:
    """Raises: HyperparameterError for the first of these that is not above 0."""
    for name, value in hyperparameters.items():
        if not value > 0:
            raise HyperparameterError(f"{name}={value}: expected a number above 0")
