"""Losses of pairs: of two answers one was chosen.  One number per pair; loss.py makes token losses of it."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

PAIR_LOSSES = ("sigmoid", "ipo")


def pair_loss(gap: Tensor, kind: str = "sigmoid", *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """The loss of pairs whose chosen answer is ahead of the rejected one by `gap`.

    sigmoid:  L = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
    ipo:      L = (h - 1 / (2 beta))^2

    Papers: DPO, arXiv:2305.18290, where h is the difference of log(pi / pi_ref) of whole answers; Bradley-Terry is the
    same with beta = 1 and h the difference of two scores; label smoothing e is conservative DPO (Mitchell, 2023);
    IPO, arXiv:2310.12036, here with h of means over tokens, as TRL computes it.

    Args: gap: h [S]; beta: above 0; label_smoothing: e, the share of pairs whose label is wrong, below 0.5.
    Returns: loss [S].
    """
    if kind == "ipo":
        return (gap - 1 / (2 * beta)).square()
    return -(1 - label_smoothing) * logsigmoid(beta * gap) - label_smoothing * logsigmoid(-beta * gap)
