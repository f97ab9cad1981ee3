import json
from pathlib import Path

import pytest
import torch

from megarl.weights.hf.folder import HFWriter, _assign_files, clear_weights, copy_tokenizer, open_hf

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4), "c": torch.zeros(1)}
SIZES = {name: t.numel() * 4 for name, t in TENSORS.items()}  # 24, 16, 4


def write(folder: Path, shard_bytes: int) -> None:
    writer = HFWriter(folder, SIZES, shard_bytes)
    for name, tensor in TENSORS.items():
        writer.add(name, tensor)
    writer.finish()


def test_files_are_filled_in_order_up_to_the_limit() -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert _assign_files(SIZES, 40) == {"a": first, "b": first, "c": second}
    assert list(_assign_files(SIZES, 10).values()) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert set(_assign_files(SIZES, 44).values()) == {"model.safetensors"}


@pytest.mark.parametrize("shard_bytes", [10, 40, 100])
def test_what_is_written_is_read_back_by_slices(tmp_path: Path, shard_bytes: int) -> None:
    write(tmp_path, shard_bytes)
    with open_hf(tmp_path) as folder:
        assert folder.shapes == {"a": (2, 3), "b": (4,), "c": (1,)}
        assert folder.read("a", 0, 1, 1).tolist() == [[3, 4, 5]]
        assert folder.read("a", 1, 1, 2).tolist() == [[1, 2], [4, 5]]
        assert folder.read("b", 0, 0, 4).tolist() == [1, 1, 1, 1]


def test_the_index_names_the_file_of_every_tensor(tmp_path: Path) -> None:
    write(tmp_path, 40)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 44}
    assert index["weight_map"]["c"] == "model-00002-of-00002.safetensors"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_tensors_out_of_order_or_lost_are_our_own_mistake(tmp_path: Path) -> None:
    writer = HFWriter(tmp_path, SIZES, 100)
    with pytest.raises(AssertionError, match="got b, expected"):
        writer.add("b", TENSORS["b"])
    writer.add("a", TENSORS["a"])
    with pytest.raises(AssertionError, match="never came"):
        writer.finish()


def test_clearing_leaves_no_loadable_model(tmp_path: Path) -> None:
    write(tmp_path, 40)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    clear_weights(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_companions_are_copied_and_weights_and_config_are_not(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write(source, 40)
    for name in (
        "config.json",
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
        "generation_config.json",
        "run.py",
    ):
        (source / name).write_text(name)
    copy_tokenizer(source, target)
    names = sorted(p.name for p in target.iterdir())
    assert names == ["chat_template.jinja", "generation_config.json", "merges.txt", "tokenizer.json"]
