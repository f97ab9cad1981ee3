"""Penalty and filter for overlong answers, and the test for groups without a learning signal."""

from __future__ import annotations

import torch

from megarl.samples.batch import Batch, Stat, Stats


def overlong_penalty(
    batch: Batch, *, max_response_length: int, buffer_length: int, factor: float = 1.0
) -> tuple[Batch, Stats]:
    """Lower the score of answers that end in the buffer before the limit, linearly.

    score += min(-(len - (max_response_length - buffer_length)) / buffer_length * factor, 0)

    len: tokens from the first trainable token of a row to its end, tool output included, in all rows of the sample; the
    penalty has no lower bound.
    Paper: DAPO, arXiv:2503.14476, section 3.4.

    Args: batch: column response_mask; score per sequence.
    Returns: the batch with the new score and, as raw_score, the original score; statistics.
    Raises: ValueError for a buffer that is not inside the limit or a factor below 0.
    """
    if not 0 < buffer_length <= max_response_length:
        raise ValueError(
            f"algorithm.overlong_buffer.len={buffer_length}: expected a number from 1 to "
            f"data.max_response_length={max_response_length}"
        )
    if not factor >= 0:
        raise ValueError(f"algorithm.overlong_buffer.penalty_factor={factor}: expected a number of at least 0")
    mask = batch.columns["response_mask"] != 0
    length_B = batch.sum_rows(batch.lengths - batch.context_lengths(mask)).double()
    excess_B = length_B - (max_response_length - buffer_length)
    penalty_B = (-excess_B / buffer_length * factor).clamp(max=0)
    score = batch.per_sequence["score"]
    num = float(batch.num_sequences)
    stats = {
        "reward/overlong_penalty": Stat("mean", float(penalty_B.sum()), num),
        "reward/overlong_share": Stat("mean", float((excess_B > 0).sum()), num),
    }
    return batch.with_per_sequence(score=(score.double() + penalty_B).to(score.dtype), raw_score=score), stats


def overlong_filter(batch: Batch) -> tuple[Batch, Stats]:
    """Clear `keep` on samples cut by the length limit: they have no gradient and count in no denominator.

    They still count in the statistics of their group.  Paper: DAPO, arXiv:2503.14476, section 3.4.

    Args: batch: truncated per sequence.
    Returns: the batch with the column keep; statistics.
    """
    truncated = batch.per_sequence["truncated"] != 0
    keep = batch.columns.get("keep", torch.ones(batch.num_tokens))
    filtered = Stat("mean", float(truncated.sum()), float(batch.num_sequences))
    keep = torch.where(truncated[batch.segment_ids], 0.0, keep)
    return batch.with_columns(keep=keep), {"reward/overlong_filtered": filtered}
