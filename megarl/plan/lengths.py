"""The distribution of completion lengths, a mean, a limit, and a tail between them; and what is computed of sequences.

A completion's length over the longest is Beta(1, p), whose mean is 1 / (p + 1): of c completions that start together
c * (1 - x)^p still run when a share x of the longest is generated.  p = 0: all have the same length.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megarl.plan.job import Job, Role

MIN_SHARED = 4  # tokens of a prompt at least for it to be computed once (megarl/data/prefix_tree.py)


def tail_of(job: Job) -> float:
    """The longest completion over the mean: the constant, as far as the limit allows, and at least 1."""
    most = job.longest - job.prompt_tokens if job.most_response is None else job.most_response
    return max(1.0, min(job.constants.tail, most / max(1.0, job.response_tokens)))


@dataclass(frozen=True)
class PrefixGroup:
    """What is packed together: a sequence, or completions behind their prompt, which stands once before them.

    Example, 3 completions of 50 tokens to a prompt of 50: PrefixGroup(3, 50 + 3 * 51), as each repeats its last token.
    """

    sequences: float
    places: float  # tokens that are computed

    def computed(self, tokens: float, job: Job) -> float:
        """Those of a pass over `tokens` of whole sequences."""
        return tokens / job.mean_tokens / self.sequences * self.places


def prefix_group_of(job: Job, role: Role, tokens: float, limit: int) -> PrefixGroup:
    """What a role packs together of `tokens` of a pass or an optimizer step, in micro-batches of `limit` tokens.

    As the run does (data/prefix_tree.py), a prompt's completions are cut into several groups where there are more
    replicas than prompts, or where they do not all fit into a micro-batch.
    """
    alone = PrefixGroup(1, job.mean_tokens)
    if not role.shares_prefixes or job.prompt_tokens < MIN_SHARED:
        return alone
    prompts = tokens / job.mean_tokens / job.n
    parts = max(ceil(role.copies / prompts - 1e-9), ceil(job.n / (role.max_sequences or job.n)))
    that_fit = 1 + int(max(0.0, limit - job.mean_tokens) / (job.response_tokens + 2))
    if (most := min(ceil(job.n / parts), that_fit)) == 1:
        return alone
    repeated = job.n - (job.n % most == 1)  # the last one may be alone
    count = ceil(job.n / most)
    return PrefixGroup(job.n / count, job.prompt_tokens + (job.n * job.response_tokens + repeated) / count)


def context_of(job: Job, group: PrefixGroup | None = None) -> float:
    """sum(l^2) / sum(l) over sequences; on average a computed token attends to half of this.

    group None: a sequence alone.
    """
    group = group or PrefixGroup(1, job.mean_tokens)
    prompt, own = job.prompt_tokens, (group.places - job.prompt_tokens) / group.sequences
    square = job.response_tokens**2 * _spread(tail_of(job))
    return (prompt**2 + group.sequences * (2 * prompt * own + square)) / group.places


def context_of_decoding(job: Job) -> float:
    """Tokens in the KV cache of a running completion, on average over all steps of a server."""
    return job.prompt_tokens + job.response_tokens * _spread(tail_of(job)) / 2


def running(at: float, tail: float) -> float:
    """Share of completions that still run when a share `at` of the longest is generated."""
    return (1 - at) ** (tail - 1)


def _spread(tail: float) -> float:
    """Mean of the squares over the square of the mean."""
    return 2 * tail / (tail + 1)
