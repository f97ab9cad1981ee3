"""Why the ranks did not make an optimizer step, as the driver can say it: with the sample, or the rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megarl.algo.finite import BadNumber, NonFiniteError
from megarl.algo.spikes import Spikes
from megarl.data.packing import RankPlan
from megarl.roles.messages import Updated
from megarl.samples.batch import Batch


def bad_number(
    role: str, spikes: Spikes | None, found: Sequence[Updated], plans: Sequence[RankPlan], packed: Batch, batch: Batch
) -> BadNumber:
    """What is wrong with the numbers of a step.

    `found`, `plans`: of each replica.  `packed`: the tokens of `batch` as the ranks got them, where a row may be a
    sample of its own.  `spikes`: of the role, which remember a spike.
    """
    bad = [(step.bad, part) for step, part in zip(found, plans, strict=True) if step.bad]
    error: BadNumber
    grad_norm = found[0].grad_norm
    if bad:
        error = _located(*bad[0], packed, batch)
    elif not math.isfinite(grad_norm):
        where = of_ranks(found[0].where)
        error = BadNumber(f"the gradient norm of {role} is {grad_norm}{where}: expected a finite number")
    else:
        assert spikes is not None, "a step with finite numbers is made unless there are limits"
        error = spikes.found(role, grad_norm, found[0].loss)
    error.role, error.groups = role, tuple(batch.per_sequence["group"].unique().tolist())
    return error


def of_ranks(where: Sequence[str | None]) -> str:
    """Where a gradient or a weight is not finite, as a part of a sentence; `where`: by rank, a parameter."""
    ranks = [rank for rank, parameter in enumerate(where) if parameter is not None]
    if not ranks:
        return " (float32 cannot hold it)"
    several = f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return f" (on {several}, first in {where[ranks[0]]})"


def _located(details: dict[str, Any], part: RankPlan, packed: Batch, batch: Batch) -> NonFiniteError:
    """The error of a replica, which ran `part`, with its place in the driver's batch."""
    at = dict(details)
    unit = part.indices[at.pop("sequence")]
    place = int(packed.sample_lengths[:unit].sum()) + at.pop("token")
    sample = int(batch.segment_ids[place])
    token = place - int(batch.sample_lengths[:sample].sum())
    return NonFiniteError(sequence=int(batch.per_sequence["index"][sample]), token=token, **at)
