"""Memory of sampling-mask replay: for each generated token the ids that could be drawn.

At most, because top-p may leave fewer than top-k; ties at the cutoff, which add a few, are not counted.
"""

from __future__ import annotations

from megarl.plan.job import Job, Role
from megarl.plan.memory.routes import COPIES

_ID_BYTES = 4  # of an id, and of the number of ids of a token
_INDEX_BYTES = 40  # on a GPU, of each id of a chunk's tokens: megarl/mcore/logprobs/support.py
_LOT = 2**22  # ids of a chunk's tokens: megarl/mcore/logprobs/fused.py


def driver_bytes(job: Job) -> int:
    """Host memory of the driver: the batch in training, and what is generated ahead of it.

    The batch has as many places for each of its tokens, prompts included, as the fullest sequence needs (ragged.py):
    with long answers and one sequence of full supports, `most_drawn`.
    """
    if not job.most_drawn:
        return 0
    places, lists = job.tokens * job.most_drawn, job.sequences * job.response_tokens * job.most_drawn
    return int(places * COPIES + lists * job.ahead + job.tokens * (COPIES + job.ahead)) * _ID_BYTES


def gpu_bytes(job: Job, role: Role) -> int:
    """On the last stage: the ids of one micro-batch, and where those of a chunk's tokens are."""
    ids = role.max_tokens * job.most_drawn
    return ids * _ID_BYTES + min(ids, _LOT) * _INDEX_BYTES
