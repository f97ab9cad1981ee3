"""Reads the output rows of other models' vocabularies from HF folders, cut as the ranks of a model hold its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megarl.hf_config import read_hf_config
from megarl.layout import padded_vocab_size
from megarl.mcore.models.model import Model, output_weight, unwrap
from megarl.weights.hf.gather import ModelParallel
from megarl.weights.hf.named import open_for
from megarl.weights.mapping.families import VOCAB_MULTIPLE, table_for
from megarl.weights.mapping.names import Vocab


def read_heads(folders: Sequence[str], model: Model, vocab_size: int) -> list[Tensor]:
    """The heads of these folders beside that of a model of `vocab_size` tokens on this rank, each [V/tp, H].

    In host memory, in the type of the model's own head; none on ranks of other stages than the last.
    Raises ValueError for a folder of a smaller vocabulary.
    """
    if not unwrap(model[-1]).post_process:
        return []
    where, dtype = ModelParallel.current().coordinate, output_weight(model[-1]).dtype
    how = {"vocab_size": vocab_size, "tp_rank": where.tp_rank, "tp_size": where.tp}
    return [read_head(folder, dtype=dtype, **how) for folder in folders]


def read_head(folder: str | Path, *, vocab_size: int, tp_rank: int, tp_size: int, dtype: torch.dtype) -> Tensor:
    """Rows of the first `vocab_size` tokens of the folder's vocabulary -> [V/tp, H] in host memory, padding zero.

    The rows of rank `tp_rank` of `tp_size` that share a vocabulary of `vocab_size` tokens.
    """
    hf = read_hf_config(folder)
    (found,) = (op for op in table_for(hf) if "output_layer.weight" in (op.param, *op.copies))
    assert isinstance(found, Vocab), "output rows are cut as a vocabulary"
    if found.vocab_size < vocab_size:
        raise ValueError(
            f"{folder}: its vocabulary has {found.vocab_size} tokens; expected at least the {vocab_size} of the policy"
        )
    wanted = Vocab("head", found.hf_name, vocab_size, found.hidden, VOCAB_MULTIPLE)
    rows = padded_vocab_size(vocab_size, tp_size) // tp_size
    head = torch.zeros(rows, found.hidden, dtype=dtype)
    with open_for(folder, hf) as opened:
        for piece in wanted.pieces(tp_rank, tp_size):
            piece.of_shard(head).copy_(opened.read(piece.hf_name, piece.dim, piece.hf_start, piece.length))
    return head
