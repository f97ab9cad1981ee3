"""One model saved in many ways: all who read the folder find the same weights, or refuse it and name the files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, write_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megarl.arch.hf_config import read_hf_config
from megarl.data.examples.tiny import write_tiny_model
from megarl.hf_server.hub_names import hub_tensors
from megarl.hf_server.model import HFModel
from megarl.weights.hf.export import finish_folder
from megarl.weights.hf.folder import INDEX, SINGLE
from megarl.weights.hf.named import check_folder, check_for_sglang, open_for

Change = Callable[[Path], None]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def split(folder: Path, **files: list[str]) -> None:
    """The single file's tensors in several ones: those named, and all others in `rest`."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    named = {name for names in files.values() for name in names}
    files["rest"] = [name for name in tensors if name not in named]
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / f"{file}.safetensors", {"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {name: f"{file}.safetensors" for file, names in files.items() for name in names},
    }
    (folder / INDEX).write_text(json.dumps(index))


def add(folder: Path, file: str, **tensors: Tensor) -> None:
    held = load_file(folder / file) if (folder / file).exists() else {}
    save_file(held | tensors, folder / file, {"format": "pt"})


def with_frequencies(folder: Path) -> None:
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(4)]
    add(folder, SINGLE, **{name: torch.ones(6) for name in [*names, "model.rotary_emb.inv_freq"]})


def single_beside_shards(folder: Path) -> None:
    kept = load_file(folder / SINGLE)
    split(folder, head=[EMBEDDING])
    save_file({name: tensor + 1 for name, tensor in kept.items()}, folder / SINGLE, {"format": "pt"})


def single_beside_a_left_index(folder: Path) -> None:
    kept = load_file(folder / SINGLE)
    split(folder, head=[EMBEDDING])
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file(kept, folder / SINGLE, {"format": "pt"})


def single_beside_an_index_of_another_model(folder: Path) -> None:
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": {"other": "model-00001-of-00002.safetensors"}})
    )


def single_among_the_shards(folder: Path) -> None:
    split(folder, head=[EMBEDDING])
    (folder / "rest.safetensors").rename(folder / SINGLE)
    (folder / INDEX).write_text((folder / INDEX).read_text().replace("rest.safetensors", SINGLE))


def older_copy(folder: Path) -> None:
    """The file that sorts last holds a tensor, too, that the index assigns to the first."""
    split(folder, head=[EMBEDDING])
    add(folder, "rest.safetensors", **{EMBEDDING: torch.zeros_like(load_file(folder / "head.safetensors")[EMBEDDING])})


def two_unassigned(folder: Path) -> None:
    older_copy(folder)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][EMBEDDING]
    index["weight_map"]["another"] = "head.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def lost_shard(folder: Path) -> None:
    split(folder, head=[EMBEDDING])
    (folder / "head.safetensors").unlink()


def only_the_head(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    save_file(
        {HEAD if name == EMBEDDING else name: t for name, t in tensors.items()}, folder / SINGLE, {"format": "pt"}
    )


def bare_decoder(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, folder / SINGLE, {"format": "pt"})


def consolidated(folder: Path) -> None:
    save_file({"tok_embeddings.weight": torch.ones(3)}, folder / "consolidated.safetensors")


def another_file(folder: Path) -> None:
    save_file({EMBEDDING: torch.ones(3)}, folder / "ema.safetensors")


def nothing(folder: Path) -> None:
    assert (folder / SINGLE).is_file()


def stacked(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / SINGLE).unlink()
    model.save_pretrained(folder, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(folder / SINGLE))


def stacked_and_single(folder: Path) -> None:
    single = {name: t for name, t in load_file(folder / SINGLE).items() if "layers.2" in name and ".experts.0." in name}
    stacked(folder)
    add(folder, SINGLE, **single)


# family, change, what the trainer and the hf engine say, what is said where SGLang is to read it; "" if nothing
FOLDERS: dict[str, tuple[str, Change, str, str]] = {
    "as it was saved": ("qwen3", nothing, "", ""),
    "old frequencies": ("qwen3", with_frequencies, "", ""),
    "two files": ("qwen3", lambda folder: split(folder, head=[EMBEDDING]), "", ""),
    "single beside shards": ("qwen3", single_beside_shards, f"{SINGLE}, and {INDEX} lists head.safetensors, rest", ""),
    "left index": ("qwen3", single_beside_a_left_index, "", f"{INDEX} lists files that are not there beside {SINGLE}"),
    "another index": ("qwen3", single_beside_an_index_of_another_model, f"{SINGLE}, and {INDEX} lists model-0", ""),
    "single among shards": ("qwen3", single_among_the_shards, f"{SINGLE}, and {INDEX} lists head.safetensors", ""),
    "older copy": ("qwen3", older_copy, "", f"head.safetensors and rest.safetensors both hold {EMBEDDING}"),
    "two unassigned": ("qwen3", two_unassigned, f"head.safetensors and rest.safetensors both hold {EMBEDDING}", ""),
    "lost shard": ("qwen3", lost_shard, "lists files that are not there: head.safetensors", ""),
    "only the head": ("qwen3", only_the_head, "", f"SGLang does not find {EMBEDDING}"),
    "bare decoder": ("qwen3", bare_decoder, "", "SGLang does not find model.embed_tokens.weight"),
    "consolidated": ("mistral", consolidated, "", ""),
    "another file": ("qwen3", another_file, "", f"SGLang reads ema.safetensors beside {SINGLE}"),
    "stacked qwen3_moe": ("qwen3_moe", stacked, "", "SGLang does not find model.layers.0.mlp.experts.0.gate_proj"),
    "stacked mixtral": ("mixtral", stacked, "", "SGLang does not find model.layers.0.block_sparse_moe"),
    "stacked minimax_m2": ("minimax_m2", stacked, "", "SGLang does not find model.layers.0.block_sparse_moe"),
    "stacked glm4_moe": ("glm4_moe", stacked, "", "SGLang does not find model.layers.1.mlp.experts.0.gate_proj"),
    "stacked gpt_oss": ("gpt_oss", stacked, "", ""),
    "stacked and single": ("mixtral", stacked_and_single, "experts.gate_up_proj, of which it is a part", ""),
}


def saved(folder: Path, family: str) -> dict[str, Tensor]:
    """Write the model; its weights by their names on the hub."""
    tied = family in ("qwen3", "mistral")
    write_model(folder, family, tied=tied, num_hidden_layers=3)
    weights = hub_tensors(tiny_model(family, tied=tied, num_hidden_layers=3), family)
    return {name: tensor.detach() for name, tensor in weights.items() if not (tied and name == HEAD)}


def read_by_ranks(folder: Path) -> dict[str, Tensor]:
    """Of the trainer and of conversions, which read through `open_for` alone."""
    check_folder(folder)
    with open_for(folder, read_hf_config(folder)) as held:
        return {name: held.read_hub(name) for name in held.hub_shapes if not name.endswith("inv_freq")}


def read_by_the_engine(folder: Path) -> dict[str, Tensor]:
    return HFModel(str(folder), torch.float32).weights


def pushed_from_disk(folder: Path) -> dict[str, Tensor]:
    """What a server of the same model loads of it by /update_weights_from_disk."""
    return HFModel(str(folder), torch.float32).read_folder(str(folder))


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_readers_find_the_same_weights_or_name_the_files(tmp_path: Path, name: str) -> None:
    family, change, refused, refused_for_sglang = FOLDERS[name]
    expected = saved(tmp_path, family)
    change(tmp_path)
    for read in (read_by_ranks, read_by_the_engine, pushed_from_disk):
        if refused:
            with pytest.raises(ValueError) as caught:
                read(tmp_path)
            assert refused in str(caught.value) and "\n" not in str(caught.value)
            continue
        found = read(tmp_path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    if refused or refused_for_sglang:
        with pytest.raises(ValueError) as caught:
            check_for_sglang(tmp_path)
        assert (refused or refused_for_sglang) in str(caught.value) and "\n" not in str(caught.value)
    else:
        check_for_sglang(tmp_path)


@pytest.mark.parametrize("kinds", [None, ["Qwen3Model"], ["Qwen3ForCausalLM"], ["Qwen3ForSequenceClassification"]])
@pytest.mark.parametrize(("role", "kind"), [("actor", "CausalLM"), ("critic", "SequenceClassification")])
def test_folder_readers_of_exports_find_transformers_classes_and_no_code(
    tmp_path: Path, kinds: list[str] | None, role: Any, kind: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_tiny_model(source)
    shutil.copytree(source, target)
    for name, what in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        config = json.loads((source / name).read_text()) | {"auto_map": {what: "code_of_the_folder.Class"}}
        if name == "config.json":
            config |= {"model_type": "qwen3", "architectures": kinds}
        (source / name).write_text(json.dumps(config))
    finish_folder(target, source, role, torch.float32)
    for trust in (True, False):
        config = AutoConfig.from_pretrained(target, trust_remote_code=trust)
        assert config.architectures == [f"Qwen3For{kind}"]
        assert len(AutoTokenizer.from_pretrained(target, trust_remote_code=trust)) > 100


def test_folder_readers_leave_the_code_of_a_family_that_transformers_lacks_named(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "kimi_k2", tied=False)
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text()) | {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    file.write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    shutil.copytree(tmp_path / "m", tmp_path / "export")
    finish_folder(tmp_path / "export", tmp_path / "m", "actor", torch.float32)
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    assert written["auto_map"] == config["auto_map"]
    assert written["architectures"] == ["DeepseekV3ForCausalLM"]
