"""Reads the weights of Megatron's own checkpoints (`dist_checkpointing`, format torch_dist), which verl writes too.

`.metadata` is a pickle: it says which part of which tensor lies where in the `.distcp` files.  It is read without
running anything: only the classes of that list are made, every other one becomes a Nothing.  Tensors are read by
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
from torch.distributed.checkpoint import filesystem, metadata

from megarl.mcore.checkpoint.boxes import Box, Shape, slices
from megarl.mcore.checkpoint.files import Reader
from megarl.mcore.checkpoint.held import Piece

METADATA = ".metadata"
_CLASSES = {
    (metadata.__name__, name): getattr(metadata, name)
    for name in (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    )
} | {(filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo, ("torch", "Size"): torch.Size}


class Nothing:
    """Stands for an object that is not needed, whatever its class does."""

    def __new__(cls, *_: Any, **__: Any) -> Nothing:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        return _CLASSES.get((module, name), Nothing)


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
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        self.sizes[name] = tuple(tensor.size[axes:]), dtype
        for chunk in tensor.chunks:
            begins, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            at = tuple(number - begin for number, begin in zip(numbers, begins, strict=False))
            if all(0 <= i < size for i, size in zip(at, sizes, strict=False)):
                place = self._places[key, begins]
                where = Chunk(self.folder / place.relative_path, place.offset, place.length, at)
                self._boxes[name].append(((begins[axes:], sizes[axes:]), where))

    def _read(self, file: Any, wishes: list[tuple[str, Box, Box, Piece]]) -> None:
        """`file`: a Chunk."""
        try:
            with open(file.file, "rb") as opened:
                opened.seek(file.offset)
                stored = torch.load(io.BytesIO(opened.read(file.length)), map_location="cpu", weights_only=True)
            for _, box, common, piece in wishes:
                piece.memory[slices(common, piece.box[0])].copy_(stored[file.at][slices(common, box[0])])
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, IndexError, TypeError) as error:
            raise ValueError(f"{file.file}: it cannot be read ({error}); expected an unchanged folder") from error


def sizes_in(folder: Path) -> list[tuple[Shape, torch.dtype]]:
    """Shape and type of each tensor of the model, without the optimizer's."""
    return [(tuple(tensor.size), tensor.properties.dtype) for tensor in _tensors_in(folder)[0].values()]


def _tensors_in(folder: Path) -> tuple[dict[str, Any], dict[tuple[str, Shape], Any]]:
    """The description of each tensor of the model, and where its boxes lie, by name and offset."""
    try:
        with open(folder / METADATA, "rb") as file:
            found = _Unpickler(file).load()
        tensors = {
            name: entry
            for name, entry in found.state_dict_metadata.items()
            if isinstance(entry, metadata.TensorStorageMetadata) and not name.startswith("optimizer.")
        }
        places = {(i.fqn, tuple(i.offset)): place for i, place in found.storage_data.items() if i.fqn in tensors}
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"{folder / METADATA}: it cannot be read ({error}); expected an unchanged folder") from error
    return tensors, places
