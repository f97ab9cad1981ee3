"""Adapters under PEFT's names: the mappings, its settings file, and what a server is told."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.mcore.models.lora import LoraSettings
from megarl.rollout.client import ServerClient, ServerError
from megarl.weights.hf.adapter import adapter_table, module_names, peft_config, read_peft_settings
from megarl.weights.mapping.names import ShardCoordinate
from megarl.weights.push.adapter_push import give_adapter
from megarl.weights.push.report import PushError

HF: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "vocab_size": 45,
}
SECOND = ShardCoordinate(tp_rank=1, tp=2)


def test_a_and_b_are_cut_as_the_weight_is() -> None:
    table = {op.param: op for op in adapter_table(HF, LoraSettings(4, 8.0, ("k_proj", "down_proj")))}
    assert len(table) == 2 * 2 * 2
    k = "decoder.layers.1.self_attention.linear_qkv.lora.k_proj"
    down = "decoder.layers.1.mlp.linear_fc2.lora.down_proj"
    shapes = {name: table[name].shape_at(SECOND) for name in (f"{k}.A", f"{k}.B", f"{down}.A", f"{down}.B")}
    assert shapes == {f"{k}.A": (4, 32), f"{k}.B": (16, 4), f"{down}.A": (4, 24), f"{down}.B": (32, 4)}
    prefix = "base_model.model.model.layers.1"
    assert table[f"{k}.B"].hf_shapes == {f"{prefix}.self_attn.k_proj.lora_B.weight": (32, 4)}
    assert table[f"{down}.A"].hf_shapes == {f"{prefix}.mlp.down_proj.lora_A.weight": (4, 48)}
    (rows,), (columns,) = table[f"{k}.B"].pieces_at(SECOND), table[f"{down}.A"].pieces_at(SECOND)
    assert (rows.dim, rows.hf_start, rows.length) == (0, 16, 16)
    assert (columns.dim, columns.hf_start, columns.length) == (1, 24, 24)
    assert not table[f"{k}.A"].is_sharded
    assert not table[f"{down}.B"].is_sharded


def test_every_projection_of_the_model_can_be_adapted() -> None:
    names = [name for op in adapter_table(HF, LoraSettings(4, 8.0)) for name in op.hf_shapes]
    assert len(names) == len(set(names)) == 2 * 7 * 2
    assert not [name for name in names if "norm" in name or "embed" in name]


MIXTRAL: dict[str, Any] = HF | {"model_type": "mixtral", "num_local_experts": 4, "head_dim": None}
DEEPSEEK: dict[str, Any] = HF | {
    "model_type": "deepseek_v3",
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}


def test_every_expert_has_its_own_pair_on_the_ranks_that_hold_it() -> None:
    settings = LoraSettings(4, 8.0, ("gate_proj", "down_proj"))
    table = {op.param: op for op in adapter_table(MIXTRAL, settings)}
    assert len(table) == 2 * 4 * 2 * 2
    expert = "decoder.layers.1.mlp.experts.local_experts.3"
    gate, down = f"{expert}.linear_fc1.lora.gate_proj", f"{expert}.linear_fc2.lora.down_proj"
    prefix = "base_model.model.model.layers.1.block_sparse_moe.experts.3"
    assert table[f"{gate}.B"].hf_shapes == {f"{prefix}.w1.lora_B.weight": (48, 4)}
    assert table[f"{down}.A"].hf_shapes == {f"{prefix}.w2.lora_A.weight": (4, 48)}
    there = ShardCoordinate(tp_rank=1, tp=4, ep_rank=1, ep=2, etp_rank=1, etp=2)
    assert all(table[f"{name}.{factor}"].held_by(there) for name in (gate, down) for factor in "AB")
    assert not table[gate.replace("experts.3", "experts.1") + ".A"].held_by(there)
    shapes = [table[f"{name}.{factor}"].shape_at(there) for name in (gate, down) for factor in "AB"]
    assert shapes == [(4, 32), (24, 4), (4, 24), (32, 4)]
    assert module_names(MIXTRAL, settings) == {"w1": "gate_proj", "w2": "down_proj"}


def test_latent_attention_and_shared_experts_have_the_names_of_the_folder() -> None:
    names = {name for op in adapter_table(DEEPSEEK, LoraSettings(4, 8.0)) for name in op.hf_shapes}
    attention = {f"self_attn.{x}" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
    projections = ("gate_proj", "up_proj", "down_proj")
    dense = attention | {f"mlp.{x}" for x in projections}
    sparse = {f"mlp.{of}.{x}" for of in ("shared_experts", *(f"experts.{e}" for e in range(4))) for x in projections}
    expected = [f"model.layers.0.{x}" for x in dense] + [f"model.layers.1.{x}" for x in attention | sparse]
    assert names == {f"base_model.model.{x}.lora_{factor}.weight" for x in expected for factor in "AB"}


@pytest.mark.parametrize(("alpha", "written"), [(8.0, 8), (2.5, 2.5)])
def test_settings_survive_pefts_file(tmp_path: Path, alpha: float, written: float) -> None:
    settings = LoraSettings(4, alpha, ("q_proj", "up_proj"))
    config = peft_config(settings, "/models/base", list(module_names(HF, settings)))
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, written, "/models/base")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert read_peft_settings(tmp_path, HF) == settings


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported; expected LORA"),
        ({"use_rslora": True}, "use_rslora=True is not supported; expected False"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern={'q_proj': 2} is not supported; expected {}"),
        ({"bias": "all"}, "bias='all' is not supported; expected 'none'"),
        (
            {"target_modules": "all-linear"},
            "target_modules='all-linear' is not supported; expected a list of projections",
        ),
        (
            {"target_modules": ["q_proj", "w1"]},
            "target_modules names w1, which this model does not have; expected some of q_proj, k_proj, v_proj, o_proj, "
            "gate_proj, up_proj, down_proj",
        ),
    ],
)
def test_other_kinds_of_adapters_are_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    config = peft_config(LoraSettings(4, 8.0), "base", ["q_proj"]) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as caught:
        read_peft_settings(tmp_path, HF)
    assert str(caught.value) == f"{tmp_path / 'adapter_config.json'}: {sentence}"


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no adapter_config\.json; expected the folder of a PEFT adapter$"):
        read_peft_settings(tmp_path, HF)


class TwoRanks(ServerClient):
    """A server that answers with what it was told, or with an error."""

    def __init__(self, status: int = 200) -> None:
        self.url, self.status, self.body = "http://here", status, dict[str, Any]()

    def server_info(self) -> dict[str, Any]:
        return {"tp_size": 2}

    def _accepted(self, route: Any, body: dict[str, Any]) -> dict[str, Any]:
        if self.status != 200:
            raise ServerError(self.url, route, self.status, "no such adapter, or so")
        self.body = body
        return {"success": True}


def test_a_server_gets_the_whole_adapter_for_every_rank_and_its_checksums() -> None:
    engine, tensors = TwoRanks(), {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    config = peft_config(LoraSettings(4, 8.0), "base", ["q_proj"])
    give_adapter(engine, "actor-7", tensors, config)
    body = engine.body
    assert (body["lora_name"], body["config_dict"]) == ("actor-7", config)
    assert len(body["serialized_named_tensors"]) == 2
    for text in body["serialized_named_tensors"]:
        got = pickle.loads(base64.b64decode(text))
        assert sorted(got) == ["a", "b"]
        assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    assert body["expected_checksums"] == {
        "a": hashlib.sha256(tensors["a"].numpy().tobytes()).hexdigest(),
        "b": hashlib.sha256(b"\x80\x3f\x80\x3f").hexdigest(),
    }
    json.dumps(body)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (404, "http://here takes no adapters; expected actor.lora.push=merged"),
        (400, "http://here did not take the adapter actor-7: no such adapter, or so"),
    ],
)
def test_a_server_that_refuses_is_named(status: int, sentence: str) -> None:
    with pytest.raises(PushError) as caught:
        give_adapter(TwoRanks(status), "actor-7", {"a": torch.ones(2)}, {})
    assert str(caught.value) == sentence
