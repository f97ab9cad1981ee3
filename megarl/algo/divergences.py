"""Divergences of the policy p from a teacher q at one token, over a vocabulary or over a teacher's most likely tokens.

A divergence is a sum over tokens v of f(p_v, q_v).  Its function gets log p and log q and returns two terms for each v:
its value f, and its pull p df/dp, so that the gradient with respect to the logits of p is pull_v - p_v sum_u pull_u.
All f here are convex, and homogeneous of degree 1.  So tokens that are put into one bucket, with the sums of their
probabilities, never raise a divergence (log-sum inequality, Csiszar 1967): over buckets it is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

# (log p, log q), each [..., V] -> (values, pulls), each [..., V]
Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
F = TypeVar("F", bound=Callable[..., tuple[Tensor, Tensor]])

DIVERGENCES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}
TAIL = 1e-6  # added to both probabilities of the tail bucket: float32's 1 - sum p is no more exact than that


def register_divergence(name: str) -> Callable[[F], F]:
    """Put a function of (log p, log q, *, settings) into the table of divergences."""

    def add(function: F) -> F:
        """The decorator: leaves the function as it is."""
        DIVERGENCES[name] = function
        return function

    return add


@register_divergence("reverse_kl")
def reverse_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(policy || teacher).

    D = sum_v p (log p - log q)

    Paper: on-policy distillation, arXiv:2306.13649 and arXiv:2306.08543.

    When: the first choice; the policy leaves what the teacher would not generate, and may keep one of several ways.
    """
    values = log_p.exp() * (log_p - log_q)
    return values, values


@register_divergence("forward_kl")
def forward_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || policy).

    D = sum_v q (log q - log p)

    Paper: arXiv:2306.13649.

    When: the policy should cover all that the teacher may generate; the gradient, p - q, is bounded.
    """
    q = log_q.exp()
    return q * (log_q - log_p), -q


@register_divergence("jsd")
def jsd(log_p: Tensor, log_q: Tensor, *, beta: float) -> tuple[Tensor, Tensor]:
    """The generalised Jensen-Shannon divergence.

    D = beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p

    Divided by beta it approaches the forward KL for small beta, divided by 1 - beta the reverse KL near 1.
    Paper: arXiv:2306.13649, equation 1.

    When: between the two, and bounded: at most log 2, at beta = 0.5.
    """
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    pulls = (1 - beta) * log_p.exp() * (log_p - log_m)
    return beta * log_q.exp() * (log_q - log_m) + pulls, pulls


def make_divergence(name: str, beta: float) -> Divergence:
    """The divergence of that name; `beta` is the jsd's, between 0 and 1."""
    return partial(jsd, beta=beta) if name == "jsd" else DIVERGENCES[name]


def with_tail(divergence: Divergence, log_p: Tensor, log_q: Tensor) -> Tensor:
    """The divergence over a teacher's most likely tokens and one bucket for all others.

    A lower bound of the divergence over the vocabulary: buckets can only lower it, and so can the constant that is
    added to both probabilities of the last one.  Differentiable in log_p.

    Args: log_p, log_q [T, K], of the same K tokens, normalised over the vocabulary.
    Returns: [T].
    """
    tails = (((1 - x.exp().sum(-1)).clamp(min=0) + TAIL).log() for x in (log_p, log_q))
    buckets = (torch.cat([x, tail[..., None]], -1) for x, tail in zip((log_p, log_q), tails, strict=True))
    return divergence(*buckets)[0].sum(-1)
