"""Host memory of what teachers say of tokens, on its way to the actor's ranks: hidden states, or likeliest tokens.

Hidden states travel one optimizer step at a time.  A rank has them of all tokens of its replica, whatever its stage.
"""

from __future__ import annotations

from megarl.plan.job import Job
from megarl.plan.memory.routes import COPIES

STEP_COPIES = 3  # of an optimizer step in the driver: the whole, its parts for the replicas, and the messages of these
RANK_COPIES = 2  # on a rank: what it was sent, and that as micro-batches
_LIKELY_BYTES = 8  # of a likely token: its id in int32, its log-prob in float32


def driver_bytes(job: Job) -> int:
    """Of the batch in training, or of hidden states that of an optimizer step."""
    if job.reads_heads:
        return int(_step_tokens(job) * _state_bytes(job)) * STEP_COPIES
    return int(job.tokens * job.teacher_top_k) * _LIKELY_BYTES * COPIES


def rank_bytes(job: Job) -> int:
    """Of a rank of the actor."""
    replicas = job.layout.data_parallel_size(job.num_ranks)
    each = _state_bytes(job) if job.reads_heads else job.teacher_top_k * _LIKELY_BYTES
    return int(_step_tokens(job) / replicas * each) * RANK_COPIES


def _step_tokens(job: Job) -> float:
    return job.tokens * min(1.0, job.mini_batch / job.prompts)


def _state_bytes(job: Job) -> int:
    """Of a token: a state of the widest teacher, in the type of the models."""
    return max(teacher.hf["hidden_size"] for teacher in job.teachers) * (4 if job.dtype == "float32" else 2)
