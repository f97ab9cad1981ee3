"""Loss aggregation: a weight per token, computed once per optimizer step.

    loss = (weight * token_loss).sum()

The weights are computed from the whole step, before it is split over micro-batches and ranks; the loss is then a plain
sum, so every split gives the same loss and gradient.  Each mode is a scale per sequence, times the mask.
n_b is the number of trainable tokens of sequence b; B counts sequences with n_b > 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.registry import AGG_MODES, register_agg_mode
from megarl.algo.segments import count_segments, segment_count, segment_sum


@dataclass(frozen=True)
class StepCounts:
    """The inputs of a mode.  Example: num_tokens [3, 0, 5], group_ids [0, 0, 1], scale 1024."""

    num_tokens: Tensor  # [B] float64: n_b; every count is exact
    group_ids: Tensor | None  # [B]: sequences of one prompt share a number
    scale: float  # S, for the modes that need it

    @property
    def num_sequences(self) -> Tensor:
        """B: sequences with a trainable token."""
        return (self.num_tokens > 0).sum()


@register_agg_mode("token-mean", "token_level")
def token_mean(step: StepCounts) -> Tensor:
    """1 / sum_b n_b: every token counts the same (DAPO's public code; arXiv:2503.14476).

    When: the default; long answers count more than short ones.
    """
    return (1 / step.num_tokens.sum()).expand_as(step.num_tokens)


@register_agg_mode("token-sum")
def token_sum(step: StepCounts) -> Tensor:
    """1.

    When: you scale the learning rate yourself.
    """
    return torch.ones_like(step.num_tokens)


@register_agg_mode("seq-mean-token-sum")
def seq_mean_token_sum(step: StepCounts) -> Tensor:
    """1 / B.

    When: the plain policy gradient; the scale of the loss grows with the length.
    """
    return (1 / step.num_sequences.double()).expand_as(step.num_tokens)


@register_agg_mode("seq-mean-token-mean", "sample_level")
def seq_mean_token_mean(step: StepCounts) -> Tensor:
    """1 / (B n_b): every sequence counts the same (GRPO, arXiv:2402.03300).

    When: gspo, gmpo; a token of a long wrong answer then has a small penalty, so answers may grow longer.
    """
    return 1 / (step.num_sequences * step.num_tokens)


@register_agg_mode("seq-mean-token-sum-norm", needs_scale=True)
def seq_mean_token_sum_norm(step: StepCounts) -> Tensor:
    """1 / (B S): a constant instead of the length (Dr.GRPO, arXiv:2503.20783).

    When: Dr.GRPO; no bias towards long or short answers.
    """
    return seq_mean_token_sum(step) / step.scale


@register_agg_mode("token-sum-norm", needs_scale=True)
def token_sum_norm(step: StepCounts) -> Tensor:
    """1 / S.

    When: the form that some documents call `seq-mean-token-sum-norm`.
    """
    return token_sum(step) / step.scale


@register_agg_mode("prompt-mean-token-mean")
def prompt_mean_token_mean(step: StepCounts) -> Tensor:
    """1 / (P sum of n_b over the prompt group): DAPO as published; P counts groups with a trainable token.

    When: every prompt must count the same.
    """
    if step.group_ids is None:
        raise ValueError("loss_agg_mode='prompt-mean-token-mean' needs the prompt group of every sequence")
    groups, group_B = step.group_ids.unique(return_inverse=True)
    tokens_P = segment_sum(step.num_tokens, group_B, len(groups))
    return 1 / ((tokens_P > 0).sum() * tokens_P[group_B])


def token_weights(
    mode: str,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    group_ids: Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """The weight of every token of one optimizer step.

    Args: mode: a name of AGG_MODES; mask, segment_ids [N] of the whole step; group_ids [B], for prompt-mean-token-mean;
        loss_scale_factor: S of the -norm modes, never the width of this batch.
    Returns: [N] in the mask's floating type (else float32); 0 at masked places, 0 everywhere if no token is trainable.
    Raises: ValueError for an unknown mode or a missing input.
    """
    if mode not in AGG_MODES:
        raise ValueError(f"loss_agg_mode={mode!r}: expected one of {', '.join(AGG_MODES)}")
    chosen, scale = AGG_MODES[mode], loss_scale_factor
    if chosen.needs_scale and (scale is None or not scale > 0):
        raise ValueError(f"loss_scale_factor={scale}: loss_agg_mode={mode} needs a number above 0")
    live = mask != 0
    num_sequences = count_segments(segment_ids) if group_ids is None else len(group_ids)
    counts = segment_count(live, segment_ids, num_sequences).double()
    scale_B = chosen.function(StepCounts(counts, group_ids, 1.0 if scale is None else scale))
    weight = torch.where(live, scale_B[segment_ids], 0.0)  # a sequence without a trainable token may have scale inf
    return weight.to(mask.dtype if mask.is_floating_point() else torch.float32)
