"""The distribution of completion lengths, a mean, a limit, and a tail between them; and what is computed of sequences.

A completion's length over the longest is Beta(1, p), whose mean is 1 / (p + 1): of c completions that start together
c * (1 - x)^p still run when a share x of the longest is generated.  p = 0: all have the same length.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megarl.layout import MIN_SHARED
from megarl.plan.job import Job, Role
from megarl.plan.time.constants import Constants


def tail_of(job: Job, constants: Constants) -> float:
    """The longest completion over the mean: the constant, as far as the limit allows, and at least 1."""
    most = job.longest - job.prompt_tokens if job.most_response is None else job.most_response
    return max(1.0, min(constants.tail, most / max(1.0, job.response_tokens)))


@dataclass(frozen=True)
class Family:
    """What is packed together: a sequence, or completions behind their prompt, which stands once before them.

    Example, 3 completions of 50 tokens to a prompt of 50: Family(3, 50 + 3 * 51), as each repeats its last token.
    """

    sequences: float
    places: float  # tokens that are computed

    def computed(self, tokens: float, job: Job) -> float:
        """Those of a pass over `tokens` of whole sequences."""
        return tokens / job.mean_tokens / self.sequences * self.places


def family_of(job: Job, role: Role, tokens: float, limit: int) -> Family:
    """What a role packs together of `tokens` of a pass or an optimizer step, in micro-batches of `limit` tokens.

    As the run does (data/prefix_tree.py), a prompt's completions are cut into several families where there are more
    replicas than prompts, or where they do not all fit into a micro-batch.
    """
    alone = Family(1, job.mean_tokens)
    if not role.shares_prefixes or job.prompt_tokens < MIN_SHARED:
        return alone
    prompts = tokens / job.mean_tokens / job.n
    parts = max(ceil(role.copies / prompts - 1e-9), ceil(job.n / (role.max_sequences or job.n)))
    that_fit = 1 + int(max(0.0, limit - job.mean_tokens) / (job.response_tokens + 2))
    if (most := min(ceil(job.n / parts), that_fit)) == 1:
        return alone
    repeated = job.n - (job.n % most == 1)  # the last one may be alone
    count = ceil(job.n / most)
    return Family(job.n / count, job.prompt_tokens + (job.n * job.response_tokens + repeated) / count)


def context_of(job: Job, constants: Constants, family: Family | None = None) -> float:
    """sum(l^2) / sum(l) over sequences; on average a computed token attends to half of this.

    family None: a sequence alone.
    """
    family = family or Family(1, job.mean_tokens)
    prompt, own = job.prompt_tokens, (family.places - job.prompt_tokens) / family.sequences
    square = job.response_tokens**2 * _spread(tail_of(job, constants))
    return (prompt**2 + family.sequences * (2 * prompt * own + square)) / family.places


def context_of_writing(job: Job, constants: Constants) -> float:
    """Tokens in the KV cache of a running completion, on average over all steps of a server."""
    return job.prompt_tokens + job.response_tokens * _spread(tail_of(job, constants)) / 2


def running(at: float, tail: float) -> float:
    """Share of completions that still run when a share `at` of the longest is generated."""
    return (1 - at) ** (tail - 1)


def _spread(tail: float) -> float:
    """Mean of the squares over the square of the mean."""
    return 2 * tail / (tail + 1)
