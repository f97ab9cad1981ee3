"""Folders of models that are no models: one sentence with the model, and what it lacks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import Cases, examples, read_refusal
from config_helpers import BASE
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megarl.config import ConfigError, load_config
from megarl.data.chat import load_tokenizer
from megarl.weights.hf.named import check_names, open_for
from megarl.weights.mapping.families import ignorable, table_for

NUMBERS = st.sampled_from([None, True, 0, -1, 1, 2, 3, 10**30, 0.5, float("nan"), "4", "", [], [1], {}, {"factor": 2}])
FIELDS = (
    *("model_type", "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "max_position_embeddings", "rope_scaling", "rope_parameters"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step"),
    *("q_lora_rank", "kv_lora_rank", "n_shared_experts", "first_k_dense_replace", "quantization_config"),
    *("tie_word_embeddings", "vision_config", "layer_types"),
)


@examples(50)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), NUMBERS, min_size=1, max_size=4))
def test_bad_input_any_field_of_config_json(cases: Cases, good: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    cases.add()
    config = json.loads((good / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        load_config([*BASE[:1], f"model.path={tmp_path}"])
    except ConfigError as error:
        read_refusal(error)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"null", b"\xff", b"[" * 99_999, b'{"a": 1} x', b"NaN"])
def test_bad_input_a_config_json_that_is_none(cases: Cases, model: Path, content: bytes) -> None:
    cases.add()
    (model / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config([*BASE[:1], f"model.path={model}"])
    read_refusal(caught.value, f"model.path={model}: its config.json")


def read_weights(folder: Path) -> None:
    """All that a rank checks and reads of a folder, without a model of Megatron."""
    hf = json.loads((folder / "config.json").read_text())
    table = table_for(hf)
    with open_for(folder, hf) as held:
        check_names(held, table, ignorable(hf, "actor"))
        for name, shape in held.shapes.items():
            held.read(name, 0, 0, shape[0])


def test_bad_input_weights_that_were_cut_or_changed(cases: Cases, model: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    read_weights(model)
    header = int.from_bytes(whole[:8], "little") + 8
    for end in (*range(0, header, header // 60), header, header + 1, len(whole) // 2, len(whole) - 1):
        cases.add()
        file.write_bytes(whole[:end])
        with pytest.raises(ValueError) as caught:
            read_weights(model)
        read_refusal(caught.value, str(model))
    for at in range(0, header, header // 60):
        cases.add()
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            read_weights(model)
        except ValueError as error:
            read_refusal(error, str(model))


def test_bad_input_tensors_that_are_not_the_models(cases: Cases, model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        for changed in ({}, {name: tensor[:-1].clone()}, {name: tensor.reshape(-1)[:1].clone()},
                        {name: tensor.unsqueeze(0)}, {f"{name}.x": tensor}, {name: torch.zeros(())}):  # fmt: skip
            cases.add()
            others = {other: value for other, value in tensors.items() if other != name}
            save_file(others | changed, file)
            with pytest.raises(ValueError, match="do not fit its config.json") as caught:
                read_weights(model)
            read_refusal(caught.value, str(model))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_bad_input_weights_that_are_not_finite(cases: Cases, model: Path, number: float) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        cases.add()
        changed = tensor.clone()
        changed.view(-1)[-1] = number
        save_file(tensors | {name: changed}, file)
        with pytest.raises(ValueError) as caught:
            read_weights(model)
        read_refusal(caught.value)
        assert str(caught.value) == f"{file}: the tensor {name} holds {number}; expected finite numbers"


@pytest.mark.parametrize("weight_map", [b"", b": 3", b': {"a": 3}', b': {"a": "absent.safetensors"}',
                                        b': {"a": "../model.safetensors"}'])  # fmt: skip
def test_bad_input_an_index_of_no_files(cases: Cases, model: Path, weight_map: bytes) -> None:
    cases.add()
    content = b'{"metadata": {}, "weight_map"' + weight_map + b"}"
    (model / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_weights(model)
    read_refusal(caught.value, str(model))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"weight_map": {"a": "model.safetensors"}}', b"\xff",
                                     b"[" * 99_999])  # fmt: skip
def test_bad_input_an_index_that_is_none(cases: Cases, model: Path, content: bytes) -> None:
    cases.add()
    (model / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_weights(model)
    read_refusal(caught.value, str(model))


def test_bad_input_tokenizers_that_are_none(cases: Cases, model: Path) -> None:
    files = [file for file in sorted(model.iterdir()) if file.name.startswith("tokenizer")]
    for file in files:
        whole = file.read_bytes()
        for content in (b"", b"{", b"[]", b"{}", b"3", b"\xff\xfe", whole[: len(whole) // 2], b"null"):
            cases.add()
            file.write_bytes(content)
            try:
                load_tokenizer(str(model))
            except ValueError as error:
                read_refusal(error, f"model.tokenizer_path={model}")
        file.write_bytes(whole)
    for file in files:
        file.unlink()
    for path in (str(model), f"{model}/absent", str(model / "config.json"), "/dev/null"):
        cases.add()
        with pytest.raises(ValueError) as caught:
            load_tokenizer(path)
        read_refusal(caught.value, f"model.tokenizer_path={path}")
