"""Reads the weights of Megatron's own checkpoints (`dist_checkpointing`, format torch_dist), which verl writes too.

`.metadata` is a pickle: it says which part of which tensor lies where in the `.distcp` files.  It is read without
running anything: each of its classes becomes a new one that only holds what it is given.  Tensors are read by
`torch.load` with `weights_only`.
Source: torch/distributed/checkpoint/{metadata,filesystem}.py, megatron/core/dist_checkpointing/mapping.py.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.arch.boxes import Box, Shape, box_at, origin, slices
from megarl.io.durable_files import inside
from megarl.mcore.checkpoint.files import Reader
from megarl.mcore.checkpoint.held import Piece

METADATA = ".metadata"
TENSOR = "TensorStorageMetadata"


class Held:
    """Stands for an object of any class: it has the attributes that a pickle gives it, or `state` if that has no names.

    An object that gets none is not needed, whatever its class does.
    """

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Unpickler(pickle.Unpickler):
    """Returns immutable types of torch, and for anything else a new class that only holds data."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        return found if found is torch.Size or isinstance(found, torch.dtype) else type(name, (Held,), {})


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    size: Shape
    dtype: torch.dtype
    boxes: list[Box]


class Chunk(NamedTuple):
    """Where a box of a tensor lies; of layers and experts that are stacked, `at` is the number of one in the box."""

    file: Path
    offset: int
    length: int
    at: Shape


class TorchDistReader(Reader):
    """The weights of such a folder, under the names of our own checkpoints."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if the folder's `.metadata` cannot be read."""
        self.folder = folder
        self.sizes: dict[str, tuple[Shape, str]] = {}
        self._boxes: Any = defaultdict(list)
        self.tensors, self._places = _tensors_in(folder)

    def fill(self, pieces: Iterable[Piece]) -> None:
        wanted = list(pieces)
        for name in {piece.name for piece in wanted}:
            self._look_up(name)
        super().fill(wanted)

    def _look_up(self, name: str) -> None:
        """Megatron stacks layers and experts: `weight[3]` is number 3 of a tensor with one more dimension."""
        key, numbers = name.partition("[")[0], tuple(map(int, re.findall(r"\[(\d+)\]", name)))
        if key not in self.tensors:
            return  # `fill` names it
        tensor, axes = self.tensors[key], len(numbers)
        self.sizes[name] = tensor.size[axes:], str(tensor.dtype).removeprefix("torch.")
        for box in tensor.boxes:
            if all(begin <= number < end for number, (begin, end) in zip(numbers, box, strict=False)):
                at = tuple(number - begin for number, (begin, _) in zip(numbers, box, strict=False))
                place = self._places[key, origin(box)]
                where = Chunk(inside(self.folder, place.relative_path), place.offset, place.length, at)
                self._boxes[name].append((box[axes:], where))

    def _read(self, file: Any, wishes: list[tuple[str, Box, Box, Piece]]) -> None:
        """`file`: a Chunk."""
        try:
            with open(file.file, "rb") as opened:
                opened.seek(file.offset)
                stored = torch.load(io.BytesIO(opened.read(file.length)), map_location="cpu", weights_only=True)
            for _, box, common, piece in wishes:
                piece.memory[slices(common, origin(piece.box))].copy_(stored[file.at][slices(common, origin(box))])
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, IndexError, TypeError) as error:
            raise ValueError(f"{file.file}: it cannot be read ({error}); expected an unchanged folder") from error


def sizes_in(folder: Path) -> list[tuple[Shape, torch.dtype]]:
    """Shape and type of each tensor of the model, without the optimizer's."""
    return [(tensor.size, tensor.dtype) for tensor in _tensors_in(folder)[0].values()]


def _tensors_in(folder: Path) -> tuple[dict[str, Stored], dict[tuple[str, Shape], Any]]:
    """The description of each tensor of the model, and where its boxes lie, by name and offset."""
    try:
        with open(folder / METADATA, "rb") as file:
            found = _Unpickler(file).load()
        tensors = {
            name: _stored(entry)
            for name, entry in found.state_dict_metadata.items()
            if type(entry).__name__ == TENSOR and not name.startswith("optimizer.")
        }
        places = {(i.fqn, tuple(i.offset)): place for i, place in found.storage_data.items() if i.fqn in tensors}
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"{folder / METADATA}: it cannot be read ({error}); expected an unchanged folder") from error
    return tensors, places


def _stored(entry: Any) -> Stored:
    dtype = entry.properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a tensor of the type {dtype!r}")
    return Stored(tuple(entry.size), dtype, [box_at(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
