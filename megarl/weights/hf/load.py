"""Loads an HF folder into the parameters of this rank, and heads of other models: only its own slices are read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import RANDOM_WEIGHTS, padded_vocab_size
from megarl.mcore.models.model import Model, output_weight, unwrap
from megarl.weights.hf.folder import HFFolder
from megarl.weights.hf.gather import Merged, ModelParallel, local_parameters
from megarl.weights.hf.named import check_names, check_tied, open_for
from megarl.weights.mapping.blocks import HFConfig, Role
from megarl.weights.mapping.families import VOCAB_MULTIPLE, ignorable, table_for, tied
from megarl.weights.mapping.names import Op, ShardCoordinate, Vocab


def load_hf(model: Model, hf_folder: str | Path, hf_config: HFConfig, *, role: Role = "actor") -> None:
    """Fill the model chunks of this rank; no communication, peak extra memory one slice.

    Load before the optimizer is made (its fp32 master weights start as copies).  A critic can load its trunk from an
    actor's folder: output rows are skipped, and if there is no value head, the model keeps its own.
    ValueError lists the tensors that are missing, unknown or of another shape.
    """
    if hf_config.get(RANDOM_WEIGHTS) is True:
        _keep_random(Path(hf_folder))
        return
    params, where = local_parameters(model), ModelParallel.current()
    assert not isinstance(params, Merged), "a base is loaded before it is adapted: merged weights are not written to"
    table = table_for(hf_config, role=role)
    with open_for(hf_folder, hf_config) as folder:
        check_names(folder, table, ignorable(hf_config, role))
        fill(params, table, folder, where.coordinate)
        if role == "actor":
            check_tied(folder, tied(hf_config), table, where.coordinate)


def _keep_random(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder}: its config.json says {RANDOM_WEIGHTS}, yet there are weights; expected one of the two"
        )
    warnings.warn(
        f"{folder}: its config.json says {RANDOM_WEIGHTS}; NOTHING IS LOADED, and what is trained is of no use",
        stacklevel=3,
    )


def fill(params: Mapping[str, Tensor], table: Sequence[Op], folder: HFFolder, coordinate: ShardCoordinate) -> None:
    """Copy the pieces of every parameter that this rank holds, tied copies included."""
    left = set(params)
    for op in table:
        targets = [params[name] for name in (op.param, *op.copies) if name in params]
        left -= {op.param, *op.copies}
        if not targets or not all(name in folder.shapes for name in op.hf_shapes):
            continue  # of another stage or expert-parallel rank, or a value head that the folder does not have
        for param in targets:
            _fill_one(param, op, folder, coordinate)
    assert not left, f"the table has no mapping for {', '.join(sorted(left))}"


@torch.no_grad()
def _fill_one(param: Tensor, op: Op, folder: HFFolder, coordinate: ShardCoordinate) -> None:
    expected = op.shape_at(coordinate)
    assert op.held_by(coordinate), f"{op.param} is on this rank, the table says it is another expert rank's"
    assert param.shape == expected, f"{op.param} has shape {tuple(param.shape)} on this rank, the table says {expected}"
    pieces = op.pieces_at(coordinate)
    if sum(p.length for p in pieces) < param.shape[pieces[0].dim if pieces else 0]:
        param.zero_()  # the padding
    for piece in pieces:
        piece.of_shard(param).copy_(folder.read(piece.hf_name, piece.dim, piece.hf_start, piece.length))


def read_heads(folders: Sequence[str], model: Model, vocab_size: int) -> list[Tensor]:
    """The heads of these folders beside that of a model of `vocab_size` tokens on this rank, each [V/tp, H].

    In host memory, in the type of the model's own head; none on ranks of other stages than the last.
    Raises ValueError for a folder of a smaller vocabulary.
    """
    if not unwrap(model[-1]).post_process:
        return []
    where, dtype = ModelParallel.current().coordinate, output_weight(model[-1]).dtype
    read = partial(read_head, vocab_size=vocab_size, tp_rank=where.tp_rank, tp_size=where.tp, dtype=dtype)
    return [read(folder) for folder in folders]


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
