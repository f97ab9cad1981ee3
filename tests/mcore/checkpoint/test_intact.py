"""Files of a checkpoint, damaged or from somebody else: one rank checks each, and nothing in it runs."""

import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_runs import flip
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import filesystem, metadata

from megarl.io import rank_files
from megarl.io.durable_files import facts_of
from megarl.io.rank_files import facts_under
from megarl.mcore.checkpoint import files
from megarl.mcore.checkpoint.files import Reader, faults_of_share, write
from megarl.mcore.checkpoint.held import Piece
from megarl.mcore.checkpoint.torch_dist import METADATA, TorchDistReader

NUM_RANKS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in range(NUM_RANKS):
        piece = Piece("a", (NUM_RANKS, 4), ((rank, rank + 1), (0, 4)), torch.full((1, 4), float(rank)))
        write(tmp_path, rank, [piece], in_background=False, about={"ranks": NUM_RANKS} if rank == 0 else None)
    return tmp_path


@pytest.mark.parametrize("num_readers", [1, 2, 5])
def test_any_number_of_ranks_reads_each_file_once(
    folder: Path, num_readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    fault_of = files.fault_of
    monkeypatch.setattr(files, "fault_of", lambda file, *a, **k: read.append(file.name) or fault_of(file, *a, **k))
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


@pytest.fixture
def torch_dist(tmp_path: Path) -> Path:
    """A checkpoint of torch's own writer, which Megatron's builds on."""
    torch_checkpoint.save({"a": torch.arange(6.0).view(2, 3)}, checkpoint_id=tmp_path / "dist", no_dist=True)
    return tmp_path / "dist"


def read_a(folder: Path) -> list[float]:
    memory = torch.zeros(2, 3)
    TorchDistReader(folder).fill([Piece("a", (2, 3), ((0, 2), (0, 3)), memory)])
    return memory.flatten().tolist()


@pytest.mark.parametrize("name", ["../other.distcp", "/etc/passwd", "link.distcp", "__0_0.distcp\0", "", 7])
def test_names_from_files_of_torch_lead_nowhere_else(torch_dist: Path, name: object) -> None:
    assert read_a(torch_dist) == [0, 1, 2, 3, 4, 5]
    (torch_dist / "__0_0.distcp").rename(torch_dist.parent / "other.distcp")
    (torch_dist / "link.distcp").symlink_to(torch_dist.parent / "other.distcp")
    found = pickle.loads((torch_dist / METADATA).read_bytes())
    for place in found.storage_data.values():
        place.relative_path = name
    (torch_dist / METADATA).write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=f"^{torch_dist}(: one of its files names|/link.distcp: a link to)"):
        read_a(torch_dist)


def attacks() -> Iterator[tuple[str, str]]:
    """Classes whose attribute is set by the opcode BUILD."""
    for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"):
        yield metadata.__name__, name
    yield from ((filesystem.__name__, "_StorageInfo"), ("torch", "Size"), ("torch", "float32"), ("torch", "Tensor"))


@pytest.mark.parametrize(("module", "name"), list(attacks()))
def test_a_checkpoint_changes_nothing_that_its_pickle_names(tmp_path: Path, module: str, name: str) -> None:
    target = pickle.GLOBAL + f"{module}\n{name}\n".encode()
    state = pickle.NONE + pickle.EMPTY_DICT + b"U\x08__init__" + target + pickle.SETITEM + pickle.TUPLE2
    (tmp_path / METADATA).write_bytes(b"\x80\x02" + target + state + pickle.BUILD + pickle.STOP)
    held = getattr(sys.modules[module], name)
    before = held.__init__
    with pytest.raises(ValueError, match="it cannot be read"):
        TorchDistReader(tmp_path)
    assert held.__init__ == before


@pytest.mark.parametrize("name", ["../other.safetensors", "link.safetensors"])
def test_names_from_files_of_ranks_lead_nowhere_else(folder: Path, tmp_path_factory: Any, name: str) -> None:
    other = tmp_path_factory.mktemp("other") / "other.safetensors"
    (folder / "rank_00001.0000.safetensors").rename(other)
    (folder / "link.safetensors").symlink_to(other)
    (folder / "rank_00001.0000.safetensors").symlink_to(other)
    words = r"expected a name in this folder|outside of its folder; expected the file itself there"
    with pytest.raises(ValueError, match=words):
        Reader(folder, NUM_RANKS)
    listed = json.loads((folder / "rank_00001.json").read_text())
    listed["files"] = {name: facts_of(other)}
    (folder / "rank_00001.json").write_text(json.dumps(listed))
    for look in (lambda: facts_under(folder, ""), lambda: faults_of_share(folder, 0, 1)):
        with pytest.raises(ValueError, match=words):
            look()
