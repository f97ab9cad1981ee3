"""Runs a policy loss on a few tokens, so that a wrong hyperparameter, name or shape is refused before a run."""

from __future__ import annotations

import torch
from torch import Generator

from megarl.algo.documented.losses import DocumentedLoss
from megarl.algo.hyperparameters import with_keys
from megarl.algo.kl import kl_estimate
from megarl.algo.loss import OWN_STATS, ActorLoss
from megarl.algo.losses.ratio import HyperparameterError
from megarl.algo.registry import POLICY_LOSSES


def rehearse(loss: ActorLoss) -> None:
    """Test the functions of a loss numerically; needs no model.

    Raises: ValueError, one sentence, for hyperparameters that they refuse, a result of another form, a statistic under
        a name that every loss reports, or a token's loss that depends on others without per_sequence=True.
    """
    try:
        _rehearse(loss)
    except HyperparameterError as error:
        raise ValueError(with_keys(loss.policy_loss, str(error))) from None


def _rehearse(loss: ActorLoss) -> None:
    x, mask, segment_ids = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    entry = POLICY_LOSSES[loss.policy_loss]
    if isinstance(entry.function, DocumentedLoss):
        entry.function.rehearse(loss.hyperparameters)
    extra = {name: torch.zeros(2) for name in loss.column_keywords}
    _, info = loss.policy(x, x, x, mask, segment_ids, **extra)
    for name in info:
        if name in OWN_STATS:
            raise ValueError(
                f"policy loss {loss.policy_loss}: every loss reports {name}, use another name for its statistic"
            )
    if "selected" in extra:
        if entry.select is None:
            raise ValueError(
                f"policy loss {loss.policy_loss}: it takes `selected`, expected register_policy_loss(..., select=...)"
            )
        loss.select(x, x, mask, Generator())
    if not loss.per_sequence and _mixes_tokens(loss):
        raise ValueError(
            f"policy loss {loss.policy_loss}: a token's loss depends on the others of its sequence; expected "
            "register_policy_loss(..., per_sequence=True), which keeps them in one micro-batch"
        )
    if not loss.kl_is_full:
        kl_estimate(loss.kl_loss_type, x, x)


def _mixes_tokens(loss: ActorLoss) -> bool:
    """Whether four tokens have another loss or gradient as two sequences than as one."""
    results = []
    for segment_ids in ([0, 0, 0, 0], [0, 0, 1, 1]):
        log_probs = torch.tensor([-0.1, -0.7, -1.3, -0.4], requires_grad=True)
        columns = log_probs, torch.tensor([-0.3, -0.5, -1.0, -0.9]), torch.tensor([1.0, -1.0, 0.5, 2.0])
        extra = {name: torch.tensor([0.0, 1.0, 0.0, 1.0]) for name in loss.column_keywords}
        token_loss, _ = loss.policy(*columns, torch.ones(4, dtype=torch.bool), torch.tensor(segment_ids), **extra)
        if token_loss.requires_grad:
            token_loss.sum().backward()
        gradient = torch.zeros(4) if log_probs.grad is None else log_probs.grad
        results.append(torch.cat([token_loss.detach(), gradient]))
    return not torch.allclose(results[0], results[1], equal_nan=True)
