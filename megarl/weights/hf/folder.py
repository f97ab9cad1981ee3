"""Reads an HF model folder's safetensors by slices, and writes them file by file."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.io.durable_files import SUMS, inside
from megarl.weights.mapping.names import Sizes, num_bytes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
SHARD_BYTES = 4 << 30
ADAPTER = "adapter_config.json"  # of PEFT
# What an export takes over from the model that it began with, besides config.json; any other file stays behind.
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("tekken.json", "tiktoken.model", "qwen.tiktoken", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
)


class HFFolder:
    """Shapes of all tensors, and slices of any of them; data is read only on request."""

    def __init__(self, folder: Path, files: Mapping[Path, Any], assigned: Mapping[str, Path] = MappingProxyType({})):
        """`files`: the opened files of tensors.  `assigned`: the file of each tensor by the folder's index.

        ValueError for a tensor that several files hold, none of which is the assigned one.
        """
        self.folder, self._files = folder, files
        holders: dict[str, list[Path]] = {}
        for path, file in files.items():
            for name in file.keys():  # noqa: SIM118
                holders.setdefault(name, []).append(path)
        self.in_several = {name: paths for name, paths in holders.items() if len(paths) > 1}
        self._place_of = {name: (self._holder(name, paths, assigned), name) for name, paths in holders.items()}
        self.shapes = {name: tuple(self._slice_of(name).get_shape()) for name in holders}

    def _holder(self, name: str, paths: list[Path], assigned: Mapping[str, Path]) -> Path:
        if len(paths) > 1 and assigned.get(name) not in paths:
            both = " and ".join(path.name for path in paths[:2])
            raise ValueError(f"{self.folder}: {both} both hold {name}; expected {INDEX} to name one of them for it")
        return paths[0] if len(paths) == 1 else assigned[name]

    def rename(self, stored: Mapping[str, str]) -> None:
        """Call tensors by other names than they are stored by; `stored`: the new name -> the old one."""
        for name, old in stored.items():
            self._place_of[name], self.shapes[name] = self._place_of.pop(old), self.shapes.pop(old)

    def path_of(self, name: str) -> Path:
        """The file that holds a tensor of `hub_shapes`."""
        return self._place_of[name][0]

    def _slice_of(self, name: str) -> Any:
        path, stored = self._place_of[name]
        return self._files[path].get_slice(stored)

    def read(self, name: str, dim: int, start: int, length: int) -> Tensor:
        """Rows (dim 0) or columns (dim 1) [start, start + length) of a tensor, in the type of the file.

        Raises ValueError if one of its numbers is NaN or infinite.
        """
        stored = self._slice_of(name)
        rows = slice(start, start + length)
        return self.checked(name, stored[rows] if dim == 0 else stored[:, rows])

    def checked(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor`, which was read from the tensor of this name.  Raises as `read` does."""
        check_finite(tensor, name, self.path_of(name))
        return tensor

    @property
    def hub_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes under the names in the folder, where those of `shapes` differ from them."""
        return self.shapes

    def dtype(self, name: str) -> torch.dtype:
        """The type in which a tensor of `hub_shapes` is read."""
        return self.read(name, 0, 0, 0).dtype

    def read_hub(self, name: str) -> Tensor:
        """A whole tensor by its name in `hub_shapes`."""
        return self.checked(name, self.read_stored(name))

    def read_stored(self, name: str) -> Tensor:
        """A whole tensor of the files, whatever numbers it holds."""
        path, stored = self._place_of[name]
        tensor: Tensor = self._files[path].get_tensor(stored)
        return tensor


def check_finite(tensor: Tensor, name: str, place: object) -> None:
    """Raises ValueError if a weight is NaN or infinite; `place`: the file that holds the tensor, or its folder."""
    if not tensor.is_floating_point() or tensor.itemsize == 1 or not tensor.numel():  # bytes are parts of numbers
        return
    # aminmax passes NaN on, reads once and allocates nothing; isfinite takes many times longer
    for number in map(float, torch.aminmax(tensor)):
        if not math.isfinite(number):
            raise ValueError(f"{place}: the tensor {name} holds {number}; expected finite numbers")


@contextmanager
def open_hf(folder: str | Path) -> Iterator[HFFolder]:
    """Map the weight files of `folder`; ValueError if there are none, or readers differ in which they take.

    Also if one is missing or damaged, or a file that an export would copy is a link out of the folder.
    """
    folder = Path(folder)
    for name in (CONFIG, *COMPANIONS):
        inside(folder, name)
    paths, assigned = _weight_files(folder)
    with ExitStack() as stack:
        yield HFFolder(folder, {path: stack.enter_context(_opened(path)) for path in paths}, assigned)


def _opened(path: Path) -> Any:
    """A file of tensors.  Raises ValueError for one that is cut or changed."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: it cannot be read ({error}); expected a whole safetensors file") from error


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files of tensors as transformers chooses them, and the file of each tensor if there is an index.

    Beside a single file transformers ignores an index, whereas SGLang takes the index's files.
    """
    index, single = inside(folder, INDEX), inside(folder, SINGLE)
    if (folder / ADAPTER).is_file():
        raise ValueError(
            f"{folder} holds {ADAPTER} beside its weights, which transformers adapts; expected one of the two"
        )
    if not index.is_file():
        if not single.is_file():
            raise ValueError(
                f"{folder} holds neither {SINGLE} nor {INDEX}; expected an HF folder with safetensors weights"
            )
        return [single], {}
    assigned = files_of_index(index)
    paths = sorted(set(assigned.values()))
    absent = [path.name for path in paths if not path.is_file()]
    if single.is_file() and paths != [single]:
        if len(absent) == len(paths) and assigned.keys() <= _names_in(single):
            return [single], {}  # the index is left over from the same model in several files
        others = ", ".join(path.name for path in paths[:3] if path != single)
        raise ValueError(f"{folder} holds {SINGLE}, and {INDEX} lists {others}; expected one of the two alone")
    if absent:
        raise ValueError(f"{index} lists files that are not there: {', '.join(absent)}")
    return paths, assigned


def _names_in(path: Path) -> set[str]:
    with _opened(path) as file:
        return set(file.keys())


def files_of_index(index: Path) -> dict[str, Path]:
    """The file of each tensor.  Raises ValueError for an index that transformers cannot read."""
    try:
        found = json.loads(index.read_bytes())
        found["metadata"]  # without which transformers ends
        file_of = dict(found["weight_map"])
        names = set(file_of.values())
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'{index}: it cannot be read ({error!r}); expected {{"metadata": {{}}, "weight_map": {{TENSOR: FILE}}}}'
        ) from None
    paths = {name: inside(index.parent, name) for name in names}
    return {tensor: paths[name] for tensor, name in file_of.items()}


class HFWriter:
    """Writes weight files of at most `shard_bytes` (a larger tensor gets its own); peak memory is one such file.

    `sizes` (name -> bytes, in order) is known before the first tensor, so the final file names are known too.
    """

    def __init__(self, folder: Path, sizes: dict[str, int], shard_bytes: int):
        self.folder = folder
        self.total_bytes = sum(sizes.values())
        self._file_of = _assign_files(sizes, shard_bytes)
        self._waiting: dict[str, Tensor] = {}
        self._left = list(sizes)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the next tensor in the order of `sizes`."""
        assert self._left and self._left[0] == name, f"got {name}, expected {self._left[:1]}"
        self._left.pop(0)
        self._waiting[name] = tensor.detach().cpu().clone()
        if not self._left or self._file_of[self._left[0]] != self._file_of[name]:
            write_whole(self.folder / self._file_of[name], lambda p: save_file(self._waiting, p, {"format": "pt"}))
            self._waiting = {}

    def finish(self) -> None:
        """Write the index if there is more than one file."""
        assert not self._left, f"tensors that never came: {self._left}"
        if set(self._file_of.values()) <= {SINGLE}:
            return
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": self._file_of}
        write_whole(self.folder / INDEX, lambda p: p.write_text(json.dumps(index, indent=2)))


def _assign_files(sizes: dict[str, int], shard_bytes: int) -> dict[str, str]:
    number = 1
    filled = 0
    numbers = {}
    for name, size in sizes.items():
        if filled and filled + size > shard_bytes:
            number, filled = number + 1, 0
        numbers[name], filled = number, filled + size
    if number == 1:
        return dict.fromkeys(sizes, SINGLE)
    return {name: f"model-{n:05d}-of-{number:05d}.safetensors" for name, n in numbers.items()}


def write_tensors(
    folder: Path, sizes: Sizes, stream: Iterable[tuple[str, Tensor]], rest: HFFolder, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the stream of these sizes, then all tensors of another folder as they are."""
    whole = dict(sizes) | {name: (shape, rest.dtype(name)) for name, shape in rest.shapes.items()}
    writer = HFWriter(folder, {name: num_bytes(*size) for name, size in whole.items()}, shard_bytes)
    for name, tensor in stream:
        writer.add(name, tensor)
    for name in rest.shapes:
        writer.add(name, rest.read_stored(name))
    writer.finish()


def write_whole(path: Path, write: Any) -> None:
    """Call `write(path)` with a temporary name, then rename, so that no half-written file has the final name."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)


def clear_weights(folder: Path) -> None:
    """Delete the model in `folder`: config first, then weights, so that an interrupted rewrite is never loaded."""
    for path in [
        folder / CONFIG,
        folder / SUMS,
        folder / INDEX,
        *folder.glob("*.safetensors"),
        *folder.glob("*.partial"),
    ]:
        path.unlink(missing_ok=True)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the COMPANIONS of a model folder: tokenizer, chat template, generation settings.

    No code is copied, so the tokenizer's settings name none: it is loaded from its files here, too.
    """
    for path in (inside(source, name) for name in COMPANIONS):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "auto_map" in (found := json.loads(settings.read_bytes())):
        del found["auto_map"]
        write_whole(settings, lambda p: p.write_text(json.dumps(found, indent=2)))
