"""GLM-4.5's table by hand, and the one parameter that its servers hold in another type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.weights.mapping.families import table_for
from megarl.weights.mapping.names import ShardCoordinate
from megarl.weights.mapping.server_map import server_table
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding
from megarl.weights.verify.digests import RankDigests, digest

CONFIG: dict[str, Any] = {
    "model_type": "glm4_moe",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 6,
    "num_nextn_predict_layers": 1,
    "vocab_size": 21,
    "tie_word_embeddings": False,
}
QKV = {"q": 16, "k": 8, "v": 8}
ATTENTION: dict[str, tuple[int, ...]] = {
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
    **{f"self_attn.{x}_proj.weight": (rows, 8) for x, rows in QKV.items()},
    "self_attn.o_proj.weight": (8, 16),
}
BIASES = {f"self_attn.{x}_proj.bias": (rows,) for x, rows in QKV.items()}
NORMS = {f"self_attn.{x}_norm.weight": (4,) for x in "qk"}


def gated(prefix: str, ffn: int) -> dict[str, tuple[int, ...]]:
    rows = {f"mlp.{prefix}{name}_proj.weight": (ffn, 8) for name in ("gate", "up")}
    return rows | {f"mlp.{prefix}down_proj.weight": (8, ffn)}


def layer(config: dict[str, Any], number: int) -> dict[str, tuple[int, ...]]:
    prefix = f"model.layers.{number}."
    shapes = {name: shape for op in table_for(config) for name, shape in op.hf_shapes.items()}
    return {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}


def test_layers_by_hand() -> None:
    assert layer(CONFIG, 0) == ATTENTION | BIASES | NORMS | gated("", 12)
    router = {"mlp.gate.weight": (2, 8), "mlp.gate.e_score_correction_bias": (2,)}
    experts = gated("experts.0.", 6) | gated("experts.1.", 6) | gated("shared_experts.", 6)
    assert layer(CONFIG, 1) == ATTENTION | BIASES | NORMS | router | experts


def test_config_json_decides_on_biases_and_norms() -> None:
    assert layer(CONFIG | {"use_qk_norm": False}, 0) == ATTENTION | BIASES | gated("", 12)
    assert layer(CONFIG | {"attention_bias": False}, 0) == ATTENTION | NORMS | gated("", 12)


@pytest.mark.parametrize("rank", [0, 1])
def test_sglang_holds_the_routers_in_float32_whatever_the_weights_are(rank: int) -> None:
    table = {op.param: op for op in server_table("sglang", CONFIG)}
    assert [name for name, op in table.items() if op.own_dtype] == ["model.layers.1.mlp.gate.weight"]
    assert not [op for op in server_table("hf", CONFIG) if op.own_dtype]
    name = "model.layers.1.mlp.gate.weight"
    weight = torch.randn(2, 8).bfloat16()
    held = RankDigests([table[name]], ShardCoordinate(rank, 2), {name: torch.bfloat16}, "sha256")
    held.add(name, weight)
    assert held.result() == {name: digest(weight.float())}


def test_slices_of_a_router_are_sent_in_the_type_of_the_server() -> None:
    gate = "model.layers.1.mlp.gate.weight"
    trainer = MegatronSharding(tuple(table_for(CONFIG)), world_size=1)
    server = ServerSharding(tuple(server_table("sglang", CONFIG)), dtypes=((gate, "float32"),))
    sent = {part.hf_name: part.dtype for part in Plan(trainer, server).sends(0)}
    assert sent.pop(gate) == "float32"
    assert set(sent.values()) == {"bfloat16"}
