"""A model folder that somebody else made: no name and no link in it leads to another of the user's files."""

import json
import os
from pathlib import Path

import pytest
from datasets import Dataset
from safetensors.torch import load_file, save_file

from megarl import cli
from megarl.commands.convert.folders import describe
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.data.readers import read_dataset_folder
from megarl.io.durable_files import faults_of_sums, inside, write_sums
from megarl.trainer.checkpoint.checkpoint import faults_in, write_manifest
from megarl.weights.hf.folder import COMPANIONS, INDEX, SINGLE, copy_tokenizer

SHAPE = TinySizes(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16)
SECRET = "the user's key"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "key.json").write_text(json.dumps(SECRET))
    return write_tiny_model(tmp_path / "model", SHAPE)


def shard(folder: Path, *names: str) -> None:
    """The weights in two files, under these names of an index."""
    tensors = list(load_file(folder / SINGLE).items())
    parts = dict(tensors[:3]), dict(tensors[3:])
    for name, part in zip(names, parts, strict=True):
        (folder / name).parent.mkdir(exist_ok=True)
        save_file(part, folder / name, {"format": "pt"})
    (folder / SINGLE).unlink()
    listed = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def refusal(model: Path, capsys: pytest.CaptureFixture[str], to: str = "hf") -> str:
    """The sentence of `megarl convert`, which leaves nothing behind."""
    target = model.parent / f"to_{to}"
    assert cli.main(["convert", f"from={model}", f"to={target}", f"format={to}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("error: ") and SECRET not in said
    assert not target.exists() and not target.with_name(f"{target.name}.partial").exists()
    return said


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_names_from_files_a_link_to_a_private_file_is_refused(
    model: Path, name: str, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    private = model.parent / "home" / "key.json"
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(Path("..") / "home" / "key.json")
    wanted = "expected the file itself there, or a link to the whole folder\n"
    words = f"{model / name}: a link to {private}, outside of its folder; {wanted}"
    assert refusal(model, capsys, to).endswith(words)


def test_names_from_files_other_files_of_a_model_stay_behind(model: Path, tmp_path: Path) -> None:
    """Whatever their names end in: the list has those of tokenizers."""
    for name in ("notes.txt", "extra.json", "more.model", "x.tiktoken", "y.jinja"):
        (model / name).symlink_to(tmp_path / "home" / "key.json")
    (tmp_path / "to").mkdir()
    copy_tokenizer(describe(model).hf_folder, tmp_path / "to")
    copied = {file.name for file in (tmp_path / "to").iterdir()}
    assert "tokenizer.json" in copied and copied <= {*COMPANIONS}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../other.safetensors", "one of its files names the file '../other.safetensors'; expected a name in this"),
        ("/OTHER", "one of its files names the file '/"),
        ("link.safetensors", "/link.safetensors: a link to "),
        ("folder/other.safetensors", "/folder/other.safetensors: a link to "),
    ],
)
def test_names_from_files_of_an_index_stay_in_its_folder(
    model: Path, tmp_path: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shard(model, "one.safetensors", "two.safetensors")
    other = tmp_path / "other.safetensors"
    (model / "two.safetensors").rename(other)
    (model / "link.safetensors").symlink_to(other)
    (model / "folder").symlink_to(tmp_path)
    text = (model / INDEX).read_text().replace("two.safetensors", name.replace("/OTHER", str(other)))
    (model / INDEX).write_text(text)
    assert words in refusal(model, capsys)


def test_names_from_files_in_a_folder_of_it_and_in_the_blobs_of_its_snapshot_are_its_own(
    model: Path, tmp_path: Path
) -> None:
    """The cache of Hugging Face: snapshots/REVISION/file is a link to ../../blobs/HASH."""
    shard(model, "parts/one.safetensors", "parts/two.safetensors")
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "123", tmp_path / "models--x" / "blobs"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    model.rename(snapshot)
    for number, file in enumerate(sorted(file for file in snapshot.rglob("*") if file.is_file())):
        file.rename(blobs / str(number))
        file.symlink_to(os.path.relpath(blobs / str(number), file.parent))
    assert describe(snapshot).dtype == "float32"
    (tmp_path / "short").symlink_to(snapshot)  # a name of the user's for the whole folder
    assert describe(tmp_path / "short").dtype == "float32"
    (tmp_path / "to").mkdir()
    copy_tokenizer(tmp_path / "short", tmp_path / "to")
    assert (tmp_path / "to" / "tokenizer.json").is_file()
    assert inside(snapshot / "parts", "one.safetensors").is_symlink()  # a folder of the snapshot, read as a model
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(blobs / ".." / ".." / "home" / "key.json")
    with pytest.raises(ValueError, match="config.json: a link to .*home/key.json, outside of its folder"):
        describe(snapshot)
    blobs.rename(tmp_path / "models--x" / "own")
    blobs.symlink_to(tmp_path / "home")  # blobs that are a link are nobody's
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(blobs / "key.json")
    with pytest.raises(ValueError, match="config.json: a link to .*home/key.json, outside of its folder"):
        inside(snapshot, "config.json")


def test_names_from_files_of_lists_and_manifests_are_judged_alike(model: Path, tmp_path: Path) -> None:
    write_sums(model, "*.safetensors")
    sums = (model / "SHA256SUMS").read_text()
    (model / "SHA256SUMS").write_text(sums.replace("model.safetensors", "../home/key.json"))
    assert "one of its files names the file '../home/key.json'" in faults_of_sums(model)[0]
    write_manifest(tmp_path, {"files": {"../key": {"bytes": 1, "sha256": ""}, "model/a": {"bytes": 1, "sha256": ""}}})
    assert faults_in(tmp_path, reads=True) == [
        f"{tmp_path}: one of its files names the file '../key'; expected a name in this folder",
        f"{tmp_path}/model/a is missing",
    ]


def test_names_from_files_of_a_dataset_stay_in_its_folder(tmp_path: Path) -> None:
    Dataset.from_list([{"prompt": "1", "ground_truth": "1"}]).save_to_disk(str(tmp_path / "mine"))
    Dataset.from_list([{"prompt": "2", "ground_truth": "2"}]).save_to_disk(str(tmp_path / "given"))
    state = tmp_path / "given" / "state.json"
    assert [row.fields["prompt"] for row in read_dataset_folder(tmp_path / "given")] == ["2"]
    state.write_text(state.read_text().replace("data-00000", "../mine/data-00000"))
    with pytest.raises(ValueError, match="names the file '../mine/data-00000-of-00001.arrow'; expected a name in this"):
        list(read_dataset_folder(tmp_path / "given"))


@pytest.mark.parametrize("number", [10**6, 10**12])
@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("num_hidden_layers", "config.json: num_hidden_layers={}; expected at most 10000"),
        ("vocab_size", "the weights in {folder} do not fit its config.json; of another shape: model.embed_tokens"),
        ("head_dim", "the weights in {folder} do not fit its config.json; of another shape: model.layers.0.self_attn"),
        ("intermediate_size", "the weights in {folder} do not fit its config.json; of another shape: model.layers.0."),
    ],
)
def test_a_config_with_sizes_that_no_file_has_is_refused_at_once(
    model: Path, field: str, number: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, field: number}))
    assert words.format(number, folder=model) in refusal(model, capsys)
