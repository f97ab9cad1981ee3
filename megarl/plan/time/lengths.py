"""The distribution of completion lengths: a mean, a limit, and a tail between them.

A completion's length over the longest is Beta(1, p), whose mean is 1 / (p + 1): of c completions that start together
c * (1 - x)^p still run when a share x of the longest is generated.  p = 0: all have the same length.
"""

from __future__ import annotations

from megarl.plan.job import Job
from megarl.plan.time.constants import Constants


def tail_of(job: Job, constants: Constants) -> float:
    """The longest completion over the mean: the constant, as far as the limit allows, and at least 1."""
    most = job.longest - job.prompt_tokens if job.most_response is None else job.most_response
    return max(1.0, min(constants.tail, most / max(1.0, job.response_tokens)))


def context_of(job: Job, constants: Constants) -> float:
    """sum(l^2) / sum(l) over sequences; on average a token attends to half of this."""
    square = job.response_tokens**2 * _spread(tail_of(job, constants))
    prompt = job.prompt_tokens
    return (prompt**2 + 2 * prompt * job.response_tokens + square) / job.mean_tokens


def context_of_writing(job: Job, constants: Constants) -> float:
    """Tokens in the KV cache of a running completion, on average over all steps of a server."""
    return job.prompt_tokens + job.response_tokens * _spread(tail_of(job, constants)) / 2


def running(at: float, tail: float) -> float:
    """Share of completions that still run when a share `at` of the longest is generated."""
    return (1 - at) ** (tail - 1)


def _spread(tail: float) -> float:
    """Mean of the squares over the square of the mean."""
    return 2 * tail / (tail + 1)
