"""The files of a checkpoint: written by each rank alone, read in other boxes, refused when something is missing."""

import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from saved_runs import no_file_above

from megarl.arch.boxes import box_at
from megarl.io.durable_files import facts_of
from megarl.mcore.checkpoint import files
from megarl.mcore.checkpoint.files import Reader, Saving, write
from megarl.mcore.checkpoint.held import Piece

WHOLE = torch.arange(24.0).view(6, 4)


def piece(offset: tuple[int, ...], shape: tuple[int, ...], *, name: str = "a", whole: tuple = (6, 4)) -> Piece:
    part = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    return Piece(name, whole, box_at(offset, shape), WHOLE[part].clone())


def empty(offset: tuple[int, ...], shape: tuple[int, ...], *, name: str = "a", whole: tuple = (6, 4)) -> Piece:
    return Piece(name, whole, box_at(offset, shape), torch.full(shape, -1.0), may_end_early=True)


def wait(saving: Saving) -> None:
    deadline = time.monotonic() + 60
    while not saving.is_done:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rank 0 has three rows, rank 1 the others, in two boxes."""
    write(tmp_path, 0, [piece((0, 0), (3, 4))], in_background=False)
    write(tmp_path, 1, [piece((3, 0), (3, 1)), piece((3, 1), (3, 3))], in_background=False)
    return tmp_path


@pytest.mark.parametrize("box", [((0, 0), (6, 4)), ((2, 0), (2, 4)), ((1, 1), (5, 2)), ((5, 3), (1, 1))])
def test_any_box_is_read_from_the_boxes_that_were_written(folder: Path, box: tuple) -> None:
    wanted = empty(*box)
    Reader(folder, 2).fill([wanted])
    assert torch.equal(wanted.memory, piece(*box).memory)


def test_values_get_the_type_of_the_memory_that_they_fill(folder: Path) -> None:
    wanted = Piece("a", (6, 4), ((0, 6), (0, 4)), torch.zeros(6, 4, dtype=torch.bfloat16))
    Reader(folder, 2).fill([wanted])
    assert torch.equal(wanted.memory, WHOLE.bfloat16())


def test_rows_of_padding_that_were_not_saved_keep_their_values(folder: Path) -> None:
    wanted = empty((4, 0), (4, 4), whole=(8, 4))
    Reader(folder, 2).fill([wanted])
    assert torch.equal(wanted.memory, torch.cat([WHOLE[4:], torch.full((2, 4), -1.0)]))
    beyond = empty((6, 0), (2, 4), whole=(8, 4))
    Reader(folder, 2).fill([beyond])
    assert (beyond.memory == -1).all()


def without_a_box(file: Path) -> None:
    content = json.loads(file.read_text())
    content["tensors"]["a"]["boxes"].pop()
    file.write_text(json.dumps(content))


LIST, TENSORS = "rank_00001.json", "rank_00000.0000.safetensors"


@pytest.mark.parametrize(
    ("name", "damage", "wanted", "sentence"),
    [
        (LIST, None, {"shape": (6, 5), "whole": (6, 5)}, r"a was saved with shape \[6, 4\]; expected \[6, 5\]$"),
        (LIST, None, {"name": "b"}, r"it has no b; expected a checkpoint of the same model$"),
        (LIST, Path.unlink, {}, f"{LIST}: missing; expected one for each of the 2 ranks that saved$"),
        (LIST, lambda file: file.write_text("{"), {}, rf"{LIST}: it cannot be read \(Expecting"),
        (LIST, without_a_box, {}, "a was not saved as a whole"),
        (TENSORS, lambda file: file.write_bytes(file.read_bytes()[:50]), {}, rf"{TENSORS}: it cannot be read \("),
        (TENSORS, lambda file: save_file({"b@0,0": torch.zeros(3, 4)}, file), {}, rf"{TENSORS}: it cannot be read \("),
    ],
)
def test_what_is_damaged_or_of_another_model_is_named(
    folder: Path, name: str, damage: Any, wanted: dict[str, Any], sentence: str
) -> None:
    if damage is not None:
        damage(folder / name)
    with pytest.raises(ValueError, match=sentence):
        Reader(folder, 2).fill([empty((0, 0), **{"shape": (6, 4)} | wanted)])


def test_files_have_a_bounded_size(tmp_path: Path) -> None:
    rows = [piece((i, 0), (1, 4)) for i in range(6)]
    with mock.patch.object(files, "FILE_BYTES", 40):  # three rows of 16 bytes reach it
        write(tmp_path, 0, rows, in_background=False)
    assert sorted(f.name for f in tmp_path.glob("*.safetensors")) == [f"rank_00000.000{i}.safetensors" for i in (0, 1)]
    wanted = empty((0, 0), (6, 4))
    Reader(tmp_path, 1).fill([wanted])
    assert torch.equal(wanted.memory, WHOLE)


def test_a_background_save_writes_the_values_of_its_beginning(tmp_path: Path) -> None:
    may_write, save = threading.Event(), files.save_file

    def later(*args: object) -> None:
        assert may_write.wait(60)
        save(*args)

    live = piece((0, 0), (6, 4))
    with mock.patch.object(files, "save_file", later):
        saving = write(tmp_path, 0, [live], in_background=True)
        live.memory.zero_()  # training goes on
        assert not saving.is_done
        assert not (tmp_path / "rank_00000.json").exists()
        may_write.set()
        wait(saving)
    wanted = empty((0, 0), (6, 4))
    Reader(tmp_path, 1).fill([wanted])
    assert torch.equal(wanted.memory, WHOLE)


@pytest.mark.parametrize("in_background", [False, True])
def test_what_the_disk_refuses_is_told_and_not_raised(tmp_path: Path, in_background: bool) -> None:
    """The other ranks of a save go on; the driver asks each for its error."""
    with no_file_above(50):
        saving = write(tmp_path, 0, [piece((0, 0), (6, 4))], in_background=in_background)
        wait(saving)
    assert "File too large" in str(saving.error)


def test_a_rank_lists_what_it_wrote(folder: Path) -> None:
    listed = json.loads((folder / "rank_00001.json").read_text())["files"]
    assert listed == {"rank_00001.0000.safetensors": facts_of(folder / "rank_00001.0000.safetensors")}
    with open(folder / "rank_00001.0000.safetensors", "rb") as file:
        assert listed["rank_00001.0000.safetensors"]["sha256"] == hashlib.sha256(file.read()).hexdigest()
