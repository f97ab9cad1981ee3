"""What a folder is taken for, and that a new one has its name only when it is whole."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.commands.convert.folders import bytes_under, check_target, describe, finish_megatron, hf_sizes, staged
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.trainer.checkpoint.checkpoint import write_manifest

SHAPE = TinySizes(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", SHAPE)


def refusal(path: Path, model: Path | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        describe(path, model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_hugging_face_folder_has_the_type_of_most_bytes_and_the_role_of_its_class(model: Path) -> None:
    found = describe(model)
    assert (found.format, found.role, found.dtype, found.hf_folder) == ("hf", "actor", "float32", model)
    assert str(found) == f"{model} (hf, actor, float32)"
    file = model / "model.safetensors"
    small = {name: t if "norm" in name else t.bfloat16() for name, t in load_file(file).items()}
    save_file(small, file, {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))
    assert (describe(model).role, describe(model).dtype) == ("critic", "bfloat16")
    assert hf_sizes(model)["model.norm.weight"] == ((16,), torch.float32)
    assert refusal(model, model) == f"model={model}: {model} is not a checkpoint of a run; expected no model="


def test_what_is_no_finished_part_of_a_checkpoint_is_told(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere") == (
        f"{tmp_path}/nowhere: neither a Hugging Face folder (no config.json) nor a finished Megatron checkpoint "
        "(no checkpoint.json)"
    )
    folder = tmp_path / "run" / "checkpoints" / "step_1"
    for role in ("actor", "critic"):
        (folder / role).mkdir(parents=True)
        (folder / role / "checkpoint.json").touch()
    unfinished = "an unfinished checkpoint (no manifest.json in it or beside it)"
    assert unfinished in refusal(folder / "actor")
    write_manifest(folder, {"files": {}})
    assert refusal(folder) == f"{folder}: a checkpoint with actor, critic; expected {folder}/actor"
    actor, config = folder / "actor", tmp_path / "run" / "config.yaml"
    assert refusal(actor) == f"{actor}: there is no {config} to say whose weights these are; expected model=FOLDER"
    assert refusal(actor, tmp_path).startswith(f"model={tmp_path}: there is no config.json; expected the Hugging Face")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    check_target(target, source)
    target.mkdir()
    check_target(target, source)  # empty
    (target / "x").touch()
    for path in (target, target / "x"):
        with pytest.raises(ValueError, match=f"^to={path}: there is something already, and nothing is overwritten"):
            check_target(path, source)
    with pytest.raises(ValueError, match="the same folder as from="):
        check_target(tmp_path / "target" / ".." / "source", source)


def test_a_folder_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with staged(target) as partial:
        (partial / "x").write_text("1")
        assert not target.exists()
    assert (target / "x").read_text() == "1"
    assert [p.name for p in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_fails_leaves_nothing_and_what_a_killed_process_left_goes(
    tmp_path: Path, error: type[BaseException]
) -> None:
    left = tmp_path / "target.partial"
    left.mkdir()
    (left / "checkpoint.json").touch()  # the shards were written, the manifest was still to come
    assert "an unfinished checkpoint" in refusal(left)
    with pytest.raises(error), staged(tmp_path / "target") as partial:
        assert not list(partial.iterdir())
        (partial / "x").touch()
        raise error
    assert not list(tmp_path.iterdir())


def test_a_megatron_folder_carries_what_it_takes_to_convert_back(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "checkpoint.json").write_text('{"ranks": 0}')
    finish_megatron(folder, model, {"role": "actor"})
    shutil.rmtree(model)
    names = {path.name for path in (folder / "hf").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    assert not any(name.endswith(".safetensors") for name in names)


def test_bytes_are_counted_at_every_depth(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("12")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_text("345")
    assert bytes_under(tmp_path) == 5
