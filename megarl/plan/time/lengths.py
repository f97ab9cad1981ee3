"""Lengths of completions: a mean, a limit, and a tail between them.

A completion's length over the longest is Beta(1, p), whose mean is 1 / (p + 1): of c completions that begin together
c * (1 - x)^p still run when a share x of the longest is written.  p = 0 is one length for all.
"""

from __future__ import annotations

from megarl.plan.job import Job
from megarl.plan.time.constants import Constants


def tail_of(job: Job, constants: Constants) -> float:
    """The longest completion over the mean one: as the constant says, as far as the limit allows, and at least 1."""
    most = job.longest - job.prompt_tokens if job.most_response is None else job.most_response
    return max(1.0, min(constants.tail, most / max(1.0, job.response_tokens)))


def context_of(job: Job, constants: Constants) -> float:
    """sum(l^2) / sum(l) over sequences, of which half is what a token attends to on average."""
    square = job.response_tokens**2 * _spread(tail_of(job, constants))
    prompt = job.prompt_tokens
    return (prompt**2 + 2 * prompt * job.response_tokens + square) / job.mean_tokens


def context_of_writing(job: Job, constants: Constants) -> float:
    """Tokens in the cache of a completion under way, on average over all steps of a server."""
    return job.prompt_tokens + job.response_tokens * _spread(tail_of(job, constants)) / 2


def running(at: float, tail: float) -> float:
    """Share of completions that still run when a share `at` of the longest is written."""
    return (1 - at) ** (tail - 1)


def _spread(tail: float) -> float:
    """Mean of the squares over the square of the mean."""
    return 2 * tail / (tail + 1)
