from typing import Any

import pytest

from megarl.weights.mapping.names import GateUp, Rename, ShardCoordinate
from megarl.weights.mapping.server_ops import StackedExperts, StackedQKV, StackedVocab
from megarl.weights.mapping.server_tables import coordinates, is_enlarged, server_table
from megarl.weights.mapping.tables import table_for

DENSE: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 21,
    "tie_word_embeddings": True,
}
MOE = DENSE | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
MOE |= {"head_dim": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def test_the_cpu_server_holds_hf_tensors_as_they_are() -> None:
    shapes = {name: shape for op in table_for(DENSE) for name, shape in op.hf_shapes.items()}
    assert {op.param: op.shape_at(ShardCoordinate()) for op in server_table("cpu", DENSE)} == shapes


def test_qwen2_in_sglang_by_hand() -> None:
    at = "model.layers.0"
    q, k, v = (f"{at}.self_attn.{x}_proj" for x in "qkv")
    qkv, mlp = f"{at}.self_attn.qkv_proj", f"{at}.mlp"
    assert server_table("sglang", DENSE) == [
        StackedVocab("model.embed_tokens.weight", "model.embed_tokens.weight", 21, 8),
        Rename(f"{at}.input_layernorm.weight", f"{at}.input_layernorm.weight", (8,)),
        StackedQKV(f"{qkv}.weight", f"{q}.weight", f"{k}.weight", f"{v}.weight", 4, 2, 2, 8),
        StackedQKV(f"{qkv}.bias", f"{q}.bias", f"{k}.bias", f"{v}.bias", 4, 2, 2, None),
        Rename(f"{at}.self_attn.o_proj.weight", f"{at}.self_attn.o_proj.weight", (8, 8), 1),
        Rename(f"{at}.post_attention_layernorm.weight", f"{at}.post_attention_layernorm.weight", (8,)),
        GateUp(f"{mlp}.gate_up_proj.weight", f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight", 12, 8),
        Rename(f"{mlp}.down_proj.weight", f"{mlp}.down_proj.weight", (8, 12), 1),
        Rename("model.norm.weight", "model.norm.weight", (8,)),
    ]


def test_the_head_of_an_untied_model_is_a_parameter_of_its_own() -> None:
    last = server_table("sglang", DENSE | {"tie_word_embeddings": False})[-1]
    assert last == StackedVocab("lm_head.weight", "lm_head.weight", 21, 8)


def test_experts_are_stacked_and_the_router_is_whole() -> None:
    of = {op.param.removeprefix("model.layers.0.mlp."): op for op in server_table("sglang", MOE) if ".mlp." in op.param}
    assert set(of) == {"gate.weight", "experts.w13_weight", "experts.w2_weight"}
    w13, w2 = of["experts.w13_weight"], of["experts.w2_weight"]
    assert isinstance(w13, StackedExperts) and w13.num_experts == 4
    assert w13.names == tuple(f"model.layers.0.mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up"))
    assert w13.shape_at(coordinates(4, 2)[0]) == (2, 2 * 3, 8)  # two experts, half of the rows of gate and of up
    assert w2.shape_at(coordinates(4, 2)[0]) == (2, 8, 3)


@pytest.mark.parametrize("config", [DENSE, MOE])
def test_every_tensor_of_the_trainer_is_in_one_parameter_of_the_server(config: dict[str, Any]) -> None:
    trainer = [name for op in table_for(config) for name in op.hf_shapes]
    server = [name for op in server_table("sglang", config) for name in op.hf_shapes]
    assert sorted(server) == sorted(trainer)


def test_ranks_of_an_expert_parallel_server() -> None:
    assert coordinates(4, 2) == [
        ShardCoordinate(0, 4, 0, 2, 0, 2),
        ShardCoordinate(1, 4, 0, 2, 1, 2),
        ShardCoordinate(2, 4, 1, 2, 0, 2),
        ShardCoordinate(3, 4, 1, 2, 1, 2),
    ]


def test_sizes_that_sglang_rounds_up_without_a_gpu() -> None:
    aligned = DENSE | {"intermediate_size": 64}
    assert not is_enlarged("sglang", aligned, 2)
    assert is_enlarged("sglang", aligned, 4)  # 64 are not 32 for each of 4 ranks; nor are 2 heads one for each
    assert is_enlarged("sglang", DENSE, 1)
    assert not is_enlarged("cpu", DENSE, 1)
