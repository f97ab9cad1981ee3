"""Files of a checkpoint, damaged or from somebody else: one rank checks each, and nothing in it runs."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_runs import flip

from megarl import rank_files
from megarl.durable_files import facts_of
from megarl.mcore.checkpoint import intact
from megarl.mcore.checkpoint.files import write
from megarl.mcore.checkpoint.held import Piece
from megarl.mcore.checkpoint.intact import faults_of_share
from megarl.mcore.checkpoint.torch_dist import METADATA, TorchDistReader
from megarl.rank_files import facts_under

NUM_RANKS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in range(NUM_RANKS):
        piece = Piece("a", (NUM_RANKS, 4), ((rank, 0), (1, 4)), torch.full((1, 4), float(rank)))
        write(tmp_path, rank, [piece], in_background=False, about={"ranks": NUM_RANKS} if rank == 0 else None)
    return tmp_path


@pytest.mark.parametrize("num_readers", [1, 2, 5])
def test_any_number_of_ranks_reads_each_file_once(
    folder: Path, num_readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    fault_of = intact.fault_of
    monkeypatch.setattr(intact, "fault_of", lambda file, *a, **k: read.append(file.name) or fault_of(file, *a, **k))
    assert [faults_of_share(folder, rank, num_readers) for rank in range(num_readers)] == [[]] * num_readers
    assert sorted(read) == [f"rank_0000{rank}.0000.safetensors" for rank in range(NUM_RANKS)]


def test_a_flipped_bit_is_found_by_one_of_them(folder: Path) -> None:
    file = folder / "rank_00001.0000.safetensors"
    flip(file, file.stat().st_size - 1)
    found = [faults_of_share(folder, rank, 2) for rank in range(2)]
    assert found == [[], [f"{file} is damaged: its SHA-256 is not that of what was written"]]


def test_the_files_of_ranks_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(rank_files, "facts_of", lambda file: read.append(file.name) or facts_of(file))
    found = facts_under(folder, "")
    assert found == {file.name: facts_of(file) for file in folder.iterdir()}
    assert sorted(read) == ["checkpoint.json", *(f"rank_0000{rank}.json" for rank in range(NUM_RANKS))]


def test_what_a_rank_wrote_and_is_not_there_is_named(folder: Path) -> None:
    (folder / "rank_00002.0000.safetensors").unlink()
    with pytest.raises(ValueError, match=r"rank_00002.0000.safetensors is missing; expected one file system"):
        facts_under(folder, "")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_what_the_list_of_a_megatron_checkpoint_would_run_does_not_run(tmp_path: Path) -> None:
    """It is a pickle."""
    (tmp_path / METADATA).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"\.metadata: it cannot be read \(.*\); expected an unchanged folder$"):
        TorchDistReader(tmp_path)
    assert not Path("ran").exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1})[:-3]])
def test_a_damaged_list_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata: it cannot be read"):
        TorchDistReader(tmp_path)
