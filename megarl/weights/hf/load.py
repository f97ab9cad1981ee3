"""Loads an HF folder into the parameters of this rank: only its own slices are read, one at a time."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megarl.layout import RANDOM_WEIGHTS
from megarl.mcore.models.model import Model
from megarl.weights.hf.folder import HFFolder, open_hf
from megarl.weights.hf.gather import ModelParallel, local_parameters
from megarl.weights.hf.merged import Merged
from megarl.weights.hf.unstacked import Unstacked
from megarl.weights.mapping.blocks import HFConfig, Role
from megarl.weights.mapping.families import ignorable, stacks_for, table_for, tied
from megarl.weights.mapping.names import Op, ShardCoordinate, some_names


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


@contextmanager
def open_for(folder: str | Path, hf_config: HFConfig) -> Iterator[HFFolder]:
    """A folder of a model, whose tensors have the names of the model's table."""
    stacks = stacks_for(hf_config)
    with open_hf(folder) as held:
        yield Unstacked(held, stacks) if stacks else held


def check_names(folder: HFFolder, table: Sequence[Op], may_ignore: Container[str]) -> None:
    """Refuse a folder whose tensors are not those of the table."""
    if quantized := next((n for n in folder.shapes if n.endswith("_scale_inv")), None):
        raise ValueError(
            f"{folder.folder}: {quantized} says that its weights are in fp8; expected them in bf16 or float32"
        )
    expected = {name: shape for op in table for name, shape in op.hf_shapes.items()}
    optional = {name for op in table if not op.required for name in op.hf_shapes}
    missing = [n for n in expected if n not in folder.shapes and n not in optional]
    extra = [n for n in folder.shapes if n not in expected and n not in may_ignore]
    misshapen = [
        f"{n} (has {list(folder.shapes[n])}, expected {list(shape)})"
        for n, shape in expected.items()
        if n in folder.shapes and folder.shapes[n] != shape
    ]
    parts = [("missing", missing), ("not of this model", extra), ("of another shape", misshapen)]
    faults = [f"{what}: {some_names(names)}" for what, names in parts if names]
    if faults:
        raise ValueError(f"the weights in {folder.folder} do not fit its config.json; " + "; ".join(faults))


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


def check_tied(folder: HFFolder, pairs: Mapping[str, str], table: Sequence[Op], coordinate: ShardCoordinate) -> None:
    """ValueError if a folder says that its embeddings are tied, but holds output rows that differ from them."""
    for name, original in pairs.items():
        pieces = [p for op in table for p in op.pieces_at(coordinate) if p.hf_name == original]
        for p in pieces if name in folder.shapes else []:
            if not torch.equal(*(folder.read(n, p.dim, p.hf_start, p.length) for n in (name, original))):
                raise ValueError(
                    f"{folder.folder}: {name} differs from {original} though config.json says "
                    "tie_word_embeddings=true; expected equal tensors, or false"
                )
