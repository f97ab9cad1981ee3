"""Policy losses without a clipped surrogate: plain policy gradients, weighted ratios, soft gates and trust regions."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algo.losses.ratio import importance_ratio, require_distances, require_positive, require_ratio_clips
from megarl.algo.registry import register_policy_loss


@register_policy_loss("reinforce", uses_ratio=False, uses_old=False)
def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, segment_ids: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The score-function gradient.

    L = -A l

    Paper: Williams 1992, doi:10.1007/BF00992696.  On-policy only: old_log_probs are not used.

    When: one optimizer step per iteration, `rollout.ahead=0`.

    Args: log_probs, old_log_probs, advantages [T]; mask [T] bool; segment_ids [T].
    Returns: token loss [T]; no statistics of its own.
    """
    return -advantages * log_probs, {}


@register_policy_loss("gpg", uses_ratio=False, uses_old=False)
def gpg(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, segment_ids: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Group policy gradient: the plain gradient, for the advantages of the estimator `gpg`, which include its scale.

    L = -A l

    Paper: GPG, arXiv:2504.02546.  On-policy only: old_log_probs are not used.

    When: one optimizer step per iteration, with `algorithm.adv_estimator=gpg`, which includes its scale.

    Args: log_probs, old_log_probs, advantages [T]; mask [T] bool; segment_ids [T].
    Returns: token loss [T]; no statistics of its own.
    """
    return -advantages * log_probs, {}


@register_policy_loss("cispo")
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The ratio is a clipped, detached weight, so that every token keeps its gradient.

    L = -sg(clamp(r, 1 - clip_low, 1 + clip_high)) A l

    Paper: CISPO, arXiv:2506.13585 (MiniMax-M1), with clip_low = 1: no lower bound.

    When: rare tokens matter (reflection, changes of reasoning) and a clip would remove their gradient.

    Args: log_probs, old_log_probs, advantages [T]; mask [T] bool; segment_ids [T].
        clip_low, clip_high: how far the weight may be from 1.
    Returns: token loss [T]; pg_clipfrac [T], where the weight is clipped.
    """
    require_ratio_clips(clip_low, clip_high)
    ratio = importance_ratio(log_probs, old_log_probs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * log_probs, {"pg_clipfrac": weight != ratio}


@register_policy_loss("sapo")
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A soft gate instead of the clip: the gradient decreases as the ratio moves away from 1.

    L = -A sigmoid(tau (r - 1)) 4 / tau,   tau = tau_pos where A > 0, else tau_neg

    At r = 1 the gradient is that of -A l, whatever tau is.
    Paper: SAPO, arXiv:2511.20347.

    When: many tokens are clipped, and a gate that closes gradually keeps more of their gradient.

    Args: log_probs, old_log_probs, advantages [T]; mask [T] bool; segment_ids [T].
        tau_pos, tau_neg: how fast the gate closes, above 0.
    Returns: token loss [T]; no statistics of its own.
    """
    require_positive(tau_pos=tau_pos, tau_neg=tau_neg)
    ratio = importance_ratio(log_probs, old_log_probs)
    tau = torch.full_like(ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    return -advantages * (tau * (ratio - 1)).sigmoid() * 4 / tau, {}


@register_policy_loss("dppo_tv")
def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    clip_low: float = 0.15,
    clip_high: float = 0.15,
    dppo_ratio_cap: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A trust region in total variation: a token counts until its probability has moved too far.

    L = -A sg(min(r, c)) l v,   p = exp(l), p_old = exp(l_old), v detached
    v = p - p_old <= clip_high where A > 0, else p - p_old >= -clip_low

    A move back towards p_old always passes.
    Paper: DPPO, arXiv:2602.04879.

    When: large vocabularies, where the ratio of an unlikely token is less meaningful than its change in probability.

    Args: log_probs, old_log_probs, advantages [T]; mask [T] bool; segment_ids [T].
        clip_low, clip_high: how far a probability may move; dppo_ratio_cap: c.
    Returns: token loss [T]; pg_clipfrac [T], where v removes the gradient.
    """
    require_distances(clip_low, clip_high)
    moved = _probability(log_probs) - _probability(old_log_probs)
    inside = torch.where(advantages > 0, moved <= clip_high, moved >= -clip_low)
    return _dppo(log_probs, old_log_probs, advantages, inside, dppo_ratio_cap)


@register_policy_loss("dppo_kl")
def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    dppo_ratio_cap: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A trust region in the KL of the binary distribution "this token or another token".

    L = -A sg(min(r, c)) l v,   v detached
    k = p_old (l_old - l) + (1 - p_old) log((1 - p_old + 1e-8) / (1 - p + 1e-8))
    v = k <= clip_high or p <= p_old where A > 0, else k <= clip_low or p >= p_old

    Paper: DPPO, arXiv:2602.04879.

    When: as `dppo_tv`.

    Args: log_probs, old_log_probs, advantages [T]; mask [T] bool; segment_ids [T].
        clip_low, clip_high: how large k may be; dppo_ratio_cap: c.
    Returns: token loss [T]; pg_clipfrac [T], where v removes the gradient.
    """
    require_distances(clip_low, clip_high)
    p, p_old = _probability(log_probs), _probability(old_log_probs)
    rest, rest_old = _rest(log_probs), _rest(old_log_probs)
    k = p_old * (old_log_probs - log_probs).detach() + rest_old * ((rest_old + 1e-8) / (rest + 1e-8)).log()
    inside = torch.where(advantages > 0, (k <= clip_high) | (p <= p_old), (k <= clip_low) | (p >= p_old))
    return _dppo(log_probs, old_log_probs, advantages, inside, dppo_ratio_cap)


@register_policy_loss("dro", uses_ratio=False)
def dro(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, segment_ids: Tensor, *, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct reward optimisation: the plain gradient with a quadratic penalty.

    L = -(l A - beta / 2 (l - l_old)^2)

    Paper: DRO, arXiv:2405.19107.

    When: samples from other policies, whose ratios are not reliable.

    Args: log_probs, old_log_probs, advantages [T]; mask [T] bool; segment_ids [T].
        beta: the strength of the quadratic penalty, above 0; there is no default.
    Returns: token loss [T]; no statistics of its own.
    """
    require_positive(beta=beta)
    return -(log_probs * advantages - beta / 2 * (log_probs - old_log_probs).square()), {}


def _dppo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, inside: Tensor, cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    require_positive(dppo_ratio_cap=cap)
    weight = importance_ratio(log_probs, old_log_probs).detach().clamp(max=cap) * inside
    return -advantages * weight * log_probs, {"pg_clipfrac": ~inside & (advantages != 0)}


def _probability(log_probs: Tensor) -> Tensor:
    """exp(l), detached; a log-prob above 0 by rounding counts as 0."""
    return log_probs.detach().clamp(max=0).exp()


def _rest(log_probs: Tensor) -> Tensor:
    """1 - exp(l), detached, without the cancellation near l = 0."""
    return -log_probs.detach().clamp(max=0).expm1()
