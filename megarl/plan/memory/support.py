"""Host memory of sampling-mask replay: for each generated token the ids that could be drawn, in the driver.

GPUs hold them for the micro-batches under way only.
"""

from __future__ import annotations

from megarl.plan.job import Job
from megarl.plan.memory.routes import COPIES

_ID_BYTES = 4  # of an id, and of the number of ids of a token


def driver_bytes(job: Job) -> int:
    """The batch in training, and what is generated ahead of it; at most, because top-p may leave fewer than top-k."""
    if not job.most_drawn:
        return 0
    numbers = job.sequences * job.response_tokens * job.most_drawn + job.tokens
    return int(numbers * (COPIES + job.ahead)) * _ID_BYTES
