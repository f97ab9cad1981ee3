"""Reads the output rows of a model's vocabulary from an HF folder, as the ranks of another model hold theirs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megarl.layout import padded_vocab_size
from megarl.mcore.models.model import read_hf_config
from megarl.weights.hf.folder import open_hf
from megarl.weights.mapping.families import VOCAB_MULTIPLE, table_for
from megarl.weights.mapping.names import Vocab


def read_head(folder: str | Path, *, vocab_size: int, tp_rank: int, tp_size: int, dtype: torch.dtype) -> Tensor:
    """Rows of the first `vocab_size` tokens of the folder's vocabulary -> [V/tp, H] in host memory, padding zero.

    The rows of rank `tp_rank` of `tp_size` that share a vocabulary of `vocab_size` tokens.
    Raises ValueError for a folder of a smaller vocabulary.
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
    with open_hf(folder) as opened:
        for piece in wanted.pieces(tp_rank, tp_size):
            piece.of_shard(head).copy_(opened.read(piece.hf_name, piece.dim, piece.hf_start, piece.length))
    return head
