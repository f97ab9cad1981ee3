"""Log-probs of transformers' and of the ranks' models on the same sequences, in the same form."""

from __future__ import annotations

from typing import Any

import torch
from parity_cases import make_step
from torch import Tensor


def log_probs(model: Any) -> list[Tensor]:
    """Of each sequence of the step, 0 for its first token."""
    batch, found = make_step(model.config.vocab_size), []
    for ids in batch.split(batch.tokens):
        scores = model(ids[None]).logits[0].log_softmax(-1)
        found.append(torch.cat([torch.zeros(1), scores[:-1].gather(1, ids[1:, None])[:, 0]]))
    return found


def per_sequence(ranks: list[dict[str, Any]], key: str) -> dict[int, Tensor]:
    lengths = make_step(4).lengths
    return {
        index: column
        for rank in ranks
        if rank[key] is not None
        for index, column in zip(rank["indices"], rank[key].split(lengths[rank["indices"]].tolist()), strict=True)
    }
