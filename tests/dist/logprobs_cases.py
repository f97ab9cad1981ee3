"""What the ranks of test_logprobs_dist.py run: each evaluates its part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.mcore.logprobs import log_probs_and_entropy
from megarl.mcore.setup import Layout, destroy_groups, make_groups


def parts(logits: Tensor, labels_of: dict[int, Tensor], factors: Tensor) -> dict[int, list[Tensor]]:
    """Of each vocabulary size: log-probs, entropies, and the gradient of this rank's half of the logits."""
    place = make_groups(Layout(tp=2))
    found = {}
    for vocab_size, labels in labels_of.items():
        own = logits.chunk(2, dim=-1)[place.rank].clone().requires_grad_()
        columns = log_probs_and_entropy(own, labels, vocab_size=vocab_size, temperature=0.8)
        total = sum((column * factor).sum() for column, factor in zip(columns, factors, strict=True))
        (gradient,) = torch.autograd.grad(total, own)
        found[vocab_size] = [*(column.detach() for column in columns), gradient]
    destroy_groups()
    return found
