"""Columns that the driver computes from a whole optimizer step, before it is split over micro-batches and ranks.

Token weights, normalised weights of rollout correction and selected tokens depend on every token of the step.  They are
computed here and passed on as columns, so that every split has the same loss and gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algo.aggregate import token_weights
from megarl.algo.loss import ActorLoss, CriticLoss
from megarl.algo.pairs import PairLoss
from megarl.algo.registry import POLICY_LOSSES
from megarl.algo.segments import clean, count_segments, segment_mean
from megarl.samples.batch import Batch


def step_columns(
    batch: Batch,
    *,
    loss: ActorLoss | CriticLoss | PairLoss,
    agg_mode: str,
    loss_scale_factor: float | None = None,
    seed: int = 0,
    normalize: bool = False,
    bypass: bool = False,
) -> Batch:
    """Add the columns that `loss` needs for an optimizer step and that the batch does not have yet.

    response_mask   m keep
    weight          by agg_mode; all 0 if the step has no trainable token
    rollout_weight  for a loss per sequence its geometric mean over the sequence; w / mean(w) if `normalize`
    old_log_probs   rollout_log_probs if `bypass`
    selected        1 where the loss's selection says so

    Args: batch: the whole step: response_mask, and if needed keep, rollout_weight, rollout_log_probs, old_log_probs,
        advantages [N]; per sequence: group [B] for prompt-mean-token-mean.  loss_scale_factor: S of the -norm modes.
        seed: of this step; normalize, bypass: from algorithm.rollout_correction.
    Raises: ValueError if an input of the mode or a column of the batch is missing.
    """
    mask = batch.columns["response_mask"]
    if "keep" in batch.columns:
        mask = mask * (batch.columns["keep"] != 0)
    group_ids = batch.per_sequence.get("group")
    weight = token_weights(agg_mode, mask, batch.segment_ids, group_ids=group_ids, loss_scale_factor=loss_scale_factor)
    batch = batch.with_columns(response_mask=mask, weight=weight)
    if not isinstance(loss, ActorLoss):
        return batch
    loss.require_agg_mode(agg_mode)
    if bypass:
        batch = batch.with_columns(old_log_probs=_column(batch, "rollout_log_probs", "bypass=true"))
    if loss.use_rollout_weight:
        twice = bypass and POLICY_LOSSES[loss.policy_loss].uses_ratio
        assert not twice, f"the ratio of {loss.policy_loss} to the server's policy is the correction already"
        ratio_weight = _column(batch, "rollout_weight", "level")
        collapsed = rollout_weights(
            ratio_weight,
            mask != 0,
            batch.segment_ids,
            of_loss=weight if normalize else None,
            per_sequence=POLICY_LOSSES[loss.policy_loss].per_sequence,
        )
        batch = batch.with_columns(rollout_weight=collapsed)
    if "selected" in loss.columns:
        generator = torch.Generator().manual_seed(seed)
        chosen = loss.select(batch.columns["old_log_probs"], batch.columns["advantages"], mask != 0, generator)
        batch = batch.with_columns(selected=chosen.to(mask.dtype))
    return batch


def rollout_weights(
    ratio_weight: Tensor, mask: Tensor, segment_ids: Tensor, *, of_loss: Tensor | None, per_sequence: bool
) -> Tensor:
    """The loss's weight w [N]: a geometric mean per sequence, then normalised, as asked.

    exp(mean_b log w) is 0 if any w of the sequence is 0.  A step whose weights are all 0 stays at 0.

    of_loss: the weights [N] by which the loss is aggregated; under them the mean of w becomes 1, so that the loss is
    the self-normalised estimate, sum a w L / sum a w, of whichever mean the mode is: over tokens or over sequences.
    """
    w = clean(ratio_weight, mask).double()
    if per_sequence:
        w = segment_mean(w.log(), mask, segment_ids, count_segments(segment_ids)).exp()[segment_ids]
    w = clean(w, mask)
    if of_loss is not None and (total := float((of_loss * w).sum())) > 0:
        w = w * (float(of_loss.double().sum()) / total)
    return w.to(ratio_weight.dtype)


def _column(batch: Batch, name: str, key: str) -> Tensor:
    if name not in batch.columns:
        raise ValueError(f"algorithm.rollout_correction.{key} needs the column {name}, which this batch has not")
    return batch.columns[name]
