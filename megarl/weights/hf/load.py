"""Loads an HF folder into the parameters of this rank: only its own slices are read, one at a time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megarl.layout import RANDOM_WEIGHTS
from megarl.mcore.models.model import Model
from megarl.weights.hf.folder import HFFolder
from megarl.weights.hf.gather import ModelParallel, local_parameters
from megarl.weights.hf.merged import Merged
from megarl.weights.hf.named import check_names, check_tied, open_for
from megarl.weights.mapping.blocks import HFConfig, Role
from megarl.weights.mapping.families import ignorable, table_for, tied
from megarl.weights.mapping.names import Op, ShardCoordinate


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
