"""The files of a sharded checkpoint: each rank writes its own, and reads of all ranks' files only what it needs.

`rank_00003.0000.safetensors`, ... hold boxes of tensors.  `rank_00003.json`, written last, lists files and boxes:
{"files": {name: {"bytes": 40, "sha256": "..."}},
 "tensors": {name: {"shape": [...], "dtype": "float32", "boxes": [[offset, shape, number of the file], ...]}}}.
`checkpoint.json`, of rank 0, says what the whole is.  No rank waits for another one, so a thread can write while the
ranks train.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.arch.boxes import Box, Shape, box_at, box_shape, box_size, intersect, origin, slices
from megarl.io.durable_files import ABSENT, PRIVATE_FOLDER, Facts, Unreadable, fault_of, inside, seal, write_text
from megarl.io.rank_files import ABOUT, UNWRITTEN, list_of, read_json
from megarl.mcore.checkpoint.held import Piece

FILE_BYTES = 2**30  # of a file, and so of the host memory that a save in the foreground takes


class Saving:
    """A save that may still be written."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether nothing more is written."""
        return self._future.done()

    @property
    def error(self) -> str | None:
        """Why the files could not be written; None: they are.  Raises any other error.  Only when it is done."""
        error = self._future.exception()
        if error is None or isinstance(error, UNWRITTEN):
            return None if error is None else str(error)
        raise error


def write(
    folder: Path, rank: int, pieces: Iterable[Piece], *, in_background: bool, about: dict[str, Any] | None = None
) -> Saving:
    """Write the pieces that this rank has to write, and `about` if it is given.

    `in_background`: copy all of them to host memory now, and write them in a thread.
    """
    own = (piece for piece in pieces if piece.memory.numel())
    if not in_background:
        done: Future[None] = Future()
        try:
            _write(folder, rank, map(_on_host, own), about)
            done.set_result(None)
        except UNWRITTEN as error:  # the other ranks wait for this one: the driver asks for the error
            done.set_exception(error)
        return Saving(done)
    copies = [_on_host(piece) for piece in own]
    executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    saving = Saving(executor.submit(_write, folder, rank, iter(copies), about))
    executor.shutdown(wait=False)
    return saving


def _on_host(piece: Piece) -> Piece:
    """The piece with a copy of its memory."""
    copy = piece.memory.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return replace(piece, memory=copy)


def _write(folder: Path, rank: int, copies: Iterator[Piece], about: dict[str, Any] | None) -> None:
    folder.mkdir(PRIVATE_FOLDER, exist_ok=True)
    if about is not None:
        write_text(folder / ABOUT, json.dumps(about, indent=2))
    files: dict[str, Facts] = {}
    tensors: dict[str, Any] = {}
    for number, batch in enumerate(_batches(copies)):
        file = folder / _name(rank, number)
        save_file({_key(piece.name, piece.box): piece.memory for piece in batch}, file)
        files[file.name] = seal(file)
        for piece in batch:
            dtype = str(piece.memory.dtype).removeprefix("torch.")
            entry = tensors.setdefault(piece.name, {"shape": piece.whole, "dtype": dtype, "boxes": []})
            entry["boxes"].append([origin(piece.box), box_shape(piece.box), number])
    content = {"files": files, "tensors": tensors}
    write_text(folder / list_of(rank), json.dumps(content, separators=(",", ":")))


def _batches(copies: Iterator[Piece]) -> Iterator[list[Piece]]:
    """At least FILE_BYTES each, except the last."""
    batch, size = list[Piece](), 0
    for copy in copies:
        batch.append(copy)
        size += copy.memory.nbytes
        if size >= FILE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _name(rank: int, number: int) -> str:
    return f"rank_{rank:05}.{number:04}.safetensors"


def _key(name: str, box: Box) -> str:
    return f"{name}@{','.join(map(str, origin(box)))}"


def about_of(folder: Path) -> dict[str, Any]:
    """What `write` got as `about`.  Raises ValueError if the folder holds no checkpoint."""
    if not (folder / ABOUT).exists():
        raise ValueError(f"{folder}: there is no checkpoint here; expected a folder that a save has finished")
    return read_json(folder / ABOUT)


class Reader:
    """The tensors of a finished checkpoint."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        """Raises ValueError if a rank's list of tensors is missing."""
        self.folder = folder
        self.sizes: dict[str, tuple[Shape, str]] = {}  # of every tensor: shape and dtype
        self._boxes: dict[str, list[tuple[Box, Path]]] = defaultdict(list)
        for rank in range(num_ranks):
            file = folder / list_of(rank)
            if not file.is_file():
                raise ValueError(f"{file}: missing; expected one for each of the {num_ranks} ranks that saved")
            for name, entry in read_json(file)["tensors"].items():
                self.sizes[name] = tuple(entry["shape"]), entry["dtype"]
                self._boxes[name] += [
                    (box_at(offset, shape), inside(folder, _name(rank, number)))
                    for offset, shape, number in entry["boxes"]
                ]

    @torch.no_grad()
    def fill(self, pieces: Iterable[Piece]) -> None:
        """Copy the saved values into the memory of each piece.

        Raises ValueError for a piece that was not saved, wholly or in part, or whose tensor had another shape.
        """
        reads: dict[Path, list[tuple[str, Box, Box, Piece]]] = defaultdict(list)
        for piece in pieces:
            if (wanted := self._wanted(piece)) is None:
                continue
            saved = [(box, file, intersect(box, wanted)) for box, file in self._boxes[piece.name]]
            parts = [(box, file, common) for box, file, common in saved if common is not None]
            if sum(box_size(common) for *_, common in parts) != box_size(wanted):
                raise ValueError(f"{self.folder}: {piece.name} was not saved as a whole; expected an unchanged folder")
            for box, file, common in parts:
                reads[file].append((_key(piece.name, box), box, common, piece))
        for file, wishes in reads.items():  # one open file at a time
            self._read(file, wishes)

    def _read(self, file: Path, wishes: list[tuple[str, Box, Box, Piece]]) -> None:
        try:
            with safe_open(file, "pt") as source:
                for key, box, common, piece in wishes:
                    stored = source.get_slice(key)[slices(common, origin(box))] if box else source.get_tensor(key)
                    piece.memory[slices(common, origin(piece.box))].copy_(stored)
        except (*ABSENT, SafetensorError) as error:
            raise ValueError(f"{file}: it cannot be read ({error}); expected an unchanged folder") from error
        except OSError as error:
            raise Unreadable.of(file, error) from error

    def _wanted(self, piece: Piece) -> Box | None:
        """The part of a piece that was saved: rows of padding may be missing."""
        if piece.name not in self.sizes:
            raise ValueError(f"{self.folder}: it has no {piece.name}; expected a checkpoint of the same model")
        shape = self.sizes[piece.name][0]
        if shape == piece.whole:
            return piece.box if piece.memory.numel() else None
        if not piece.may_end_early or shape[1:] != piece.whole[1:]:
            raise ValueError(
                f"{self.folder}: {piece.name} was saved with shape {list(shape)}; expected {list(piece.whole)}"
            )
        return intersect(box_at([0] * len(shape), shape), piece.box)


def faults_of_share(folder: Path, rank: int, num_ranks: int) -> list[str]:
    """Read this rank's share of the files that the ranks of a save have listed; a sentence for each damaged one.

    The digests are those that each rank made directly after it wrote a file, from pages that were still in memory.
    """
    listed: dict[Path, Facts] = {}
    for writer in range(about_of(folder)["ranks"]):
        files = read_json(folder / list_of(writer))["files"]
        listed |= {inside(folder, name): facts for name, facts in files.items()}
    share = sorted(listed.items())[rank::num_ranks]
    return [f"{file} {fault}" for file, facts in share if (fault := fault_of(file, facts, reads=True))]
