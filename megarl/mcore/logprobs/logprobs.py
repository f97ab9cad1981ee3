"""Columns of tokens from hidden states and the vocabulary head, without holding all logits in memory.

16384 tokens with a vocabulary of 152k are 10 GB of logits in float32, and a plain softmax makes seven such tensors.
Here the logits of a chunk are computed, used and discarded, in the forward and again in the backward pass: `fused.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megarl.algo.divergences import Divergence
from megarl.mcore.logprobs.divergence import TeacherStates, divergence_of_chunks
from megarl.mcore.logprobs.fused import Job, columns_of_chunks
from megarl.mcore.logprobs.support import Support
from megarl.mcore.logprobs.top_k import log_probs_of_ids
from megarl.mcore.models.model import output_weight, unwrap

NAMES = ("log_probs", "entropy", "sum_pi_squared", "full_kl")
DIVERGENCE = "divergence"  # the column that needs teachers
OF_IDS = "log_probs_of_ids"  # the columns [T, K] that need ids


@dataclass(frozen=True)
class ReferenceStates:
    """The frozen model for `full_kl`: its last-stage hidden states of the same tokens, and its head."""

    hidden: Tensor  # like `hidden` of the actor; may be in host memory
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
    support: Support | None = None,
    divergence: Divergence | None = None,
    teachers: TeacherStates | None = None,
    ids: Tensor | None = None,
) -> dict[str, Tensor]:
    """hidden [T, H] ([T/tp, H] under sequence parallelism) of the last chunk, labels [T] -> {name: [T] float32}.

    All use the softmax p of logits / temperature over the true vocabulary: padding rows have no probability.  Where a
    label has a support, p (and q) is renormalised over it: the other ids have no probability either.
    `log_probs` of the labels; `entropy` = -sum_v p log p; `sum_pi_squared` = sum_v p^2; `full_kl` = sum_v p (log p -
    log q), q of the reference at the same temperature; `divergence` from each token's teacher, at the same temperature;
    `log_probs_of_ids` [T, K] of the tokens `ids`.
    All are differentiable in the hidden states and the weight.
    ValueError for an unknown name, or full_kl without a reference of the same vocabulary.
    """
    weight, special = output_weight(chunk), (DIVERGENCE, OF_IDS)
    own = tuple(name for name in names if name not in special)
    _check(own, weight, reference)
    job = job_of(chunk, own, vocab_size, temperature)
    sides = () if reference is None or "full_kl" not in names else (reference.hidden, reference.weight)
    columns = columns_of_chunks(job, hidden, weight, labels, *sides, support=support) if own else {}
    if DIVERGENCE in names:
        assert divergence is not None and teachers is not None, f"the column {DIVERGENCE} needs teachers"
        columns[DIVERGENCE] = divergence_of_chunks(job, divergence, hidden, weight, teachers)
    if OF_IDS in names:
        assert ids is not None, f"the column {OF_IDS} needs ids"
        columns[OF_IDS] = log_probs_of_ids(job, hidden, weight, ids)
    return columns


def job_of(chunk: nn.Module, names: Sequence[str], vocab_size: int, temperature: float) -> Job:
    """How the columns of a model's last chunk are computed."""
    config = unwrap(chunk).config
    return Job(
        tuple(names),
        vocab_size,
        temperature,
        sequence_parallel=config.sequence_parallel,
        fused_accumulation=config.gradient_accumulation_fusion,
    )


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
    # Rows include padding; different vocabularies with the same padded size are detected from config.json at the start.
    if len(reference.weight) != len(weight):
        raise ValueError(
            f"full_kl: the reference has {len(reference.weight)} rows of the vocabulary on this rank and the actor "
            f"{len(weight)}; expected one vocabulary and one layout"
        )


def keep_hidden(hidden: Tensor) -> Tensor:
    """A copy for later without the autograd graph: in pinned host memory if it is on a GPU, else not copied."""
    if not hidden.is_cuda:
        return hidden.detach()
    kept = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
    return kept.copy_(hidden.detach(), non_blocking=True)
