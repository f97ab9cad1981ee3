"""Columns of tokens from hidden states and the vocabulary head; their logits never stand in memory as a whole.

16384 tokens of a vocabulary of 152k are 10 GB of logits in float32, and a softmax written down plainly makes seven such
tensors.  Here a few tokens' logits are made, read, and thrown away, forwards and once more backwards: see `fused.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megarl.mcore.logprobs.fused import Job, columns_of_chunks
from megarl.mcore.models.model import output_weight, unwrap

NAMES = ("log_probs", "entropy", "sum_pi_squared", "full_kl")


@dataclass(frozen=True)
class ReferenceStates:
    """The frozen model that `full_kl` compares with: its last-stage hidden states of the same tokens, and its head."""

    hidden: Tensor  # as `hidden` of the actor; may lie in host memory
    weight: Tensor  # [V/tp, H of the reference]


def token_columns(
    chunk: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    names: Sequence[str],
    *,
    vocab_size: int,
    temperature: float = 1.0,
    reference: ReferenceStates | None = None,
) -> dict[str, Tensor]:
    """hidden [T, H] ([T/tp, H] under sequence parallelism) of the last chunk, labels [T] -> {name: [T] float32}.

    Of the softmax of logits / temperature over the true vocabulary: the rows that pad it have no probability.
    `log_probs` of the labels; `entropy` = -sum_v p log p; `sum_pi_squared` = sum_v p^2; `full_kl` = sum_v p (log p -
    log q), q of the reference at the same temperature.  All are differentiable in the hidden states and the weight.
    ValueError for a name that there is not, or full_kl without a reference of the same vocabulary.
    """
    weight = output_weight(chunk)
    _check(names, weight, reference)
    config = unwrap(chunk).config
    job = Job(
        tuple(names),
        vocab_size,
        temperature,
        sequence_parallel=config.sequence_parallel,
        fused_accumulation=config.gradient_accumulation_fusion,
    )
    if reference is None or "full_kl" not in names:
        return columns_of_chunks(job, hidden, weight, labels)
    return columns_of_chunks(job, hidden, weight, labels, reference.hidden, reference.weight)


def _check(names: Sequence[str], weight: Tensor, reference: ReferenceStates | None) -> None:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"names={list(names)}: there is no column {unknown[0]}; expected some of {', '.join(NAMES)}")
    if "full_kl" not in names:
        return
    if reference is None:
        raise ValueError(
            "names: full_kl without a reference; expected a reference model in the actor's group and layout"
        )
    # Padded rows: smaller vocabularies that pad to as many are told apart by config.json, before the start.
    if len(reference.weight) != len(weight):
        raise ValueError(
            f"full_kl: the reference has {len(reference.weight)} rows of the vocabulary on this rank and the actor "
            f"{len(weight)}; expected one vocabulary and one layout"
        )


def keep_hidden(hidden: Tensor) -> Tensor:
    """The same numbers for later, without their graph: in pinned host memory where they lie on a GPU."""
    if not hidden.is_cuda:
        return hidden.detach()
    kept = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
    return kept.copy_(hidden.detach(), non_blocking=True)
