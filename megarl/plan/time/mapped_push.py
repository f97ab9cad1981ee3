"""Time of a push through buckets that servers on the trainer's GPUs map (transport `shared`).

Every rank gathers whole tensors into a bucket while servers load the bucket before, so the slower of the two counts.
"""

from __future__ import annotations

from math import ceil

from megarl.plan.job import Job
from megarl.plan.time.constants import Constants


def seconds(job: Job, num_bytes: int, gather_s: float, constants: Constants) -> float:
    """`gather_s`: of all tensors on every rank.  Rank 0 also reads all bytes once for their digests.

    A server's GPU reads and writes its own part of each bucket; each bucket has a fixed cost.
    """
    memory = job.gpu.memory_bandwidth * constants.memory
    buckets = ceil(2 * num_bytes / job.bucket_bytes)
    fill_s = gather_s + num_bytes / memory
    load_s = 2 * num_bytes / job.server_gpus / memory + buckets * constants.bucket_s
    return max(fill_s, load_s) + min(fill_s, load_s) / buckets  # nothing hides the first bucket's filling
