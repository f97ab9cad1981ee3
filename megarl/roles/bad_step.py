"""Why the ranks did not make an optimizer step, as the driver can say it: with the sample, or the rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megarl.algo.finite import BadNumber, NonFiniteError
from megarl.algo.spikes import Spikes
from megarl.data.packing import RankPlan
from megarl.group import Reply
from megarl.samples.batch import Batch


def bad_number(
    role: str, spikes: Spikes | None, replies: Sequence[Reply], plans: Sequence[RankPlan], packed: Batch, batch: Batch
) -> BadNumber:
    """What is wrong with the numbers of a step.

    `replies`, `plans`: of each replica.  `packed`: the tokens of `batch` as the ranks got them, where a row may be a
    sample of its own.  `spikes`: of the role, which remember a spike.
    """
    step = replies[0].result
    bad = [(reply.result["bad"], part) for reply, part in zip(replies, plans, strict=True) if reply.result["bad"]]
    found: BadNumber
    if bad:
        found = _located(*bad[0], packed, batch)
    elif not math.isfinite(step["grad_norm"]):
        where = of_ranks(step["where"])
        found = BadNumber(f"the gradient norm of {role} is {step['grad_norm']}{where}: expected a finite number")
    else:
        assert spikes is not None, "a step with finite numbers is made unless there are limits"
        found = spikes.found(role, step["grad_norm"], step["loss"])
    found.role, found.groups = role, tuple(batch.per_sequence["group"].unique().tolist())
    return found


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
