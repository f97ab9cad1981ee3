"""MiniMax-M2's table by hand: norms over all heads, which are cut with them, and routers in another type."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.weights.mapping.families import ignorable, table_for
from megarl.weights.mapping.names import Piece, ShardCoordinate
from megarl.weights.mapping.server_map import server_table
from megarl.weights.mapping.sglang_ops import KeyHeads

CONFIG: dict[str, Any] = {
    "model_type": "minimax_m2",
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "num_local_experts": 2,
    "vocab_size": 21,
    "tie_word_embeddings": False,
}
LAYER, MOE = "model.layers.0", "model.layers.0.block_sparse_moe"


def test_a_layer_by_hand() -> None:
    shapes = {name: shape for op in table_for(CONFIG) for name, shape in op.hf_shapes.items()}
    expected = {
        "input_layernorm.weight": (8,),
        "post_attention_layernorm.weight": (8,),
        "self_attn.q_proj.weight": (12, 8),
        "self_attn.k_proj.weight": (6, 8),
        "self_attn.v_proj.weight": (6, 8),
        "self_attn.q_norm.weight": (12,),
        "self_attn.k_norm.weight": (6,),
        "self_attn.o_proj.weight": (8, 12),
        "block_sparse_moe.gate.weight": (2, 8),
        "block_sparse_moe.e_score_correction_bias": (2,),
        **{f"block_sparse_moe.experts.{n}.{w}.weight": (6, 8) for n in range(2) for w in ("w1", "w3")},
        **{f"block_sparse_moe.experts.{n}.w2.weight": (8, 6) for n in range(2)},
    }
    assert {n.removeprefix(f"{LAYER}."): s for n, s in shapes.items() if n.startswith(f"{LAYER}.")} == expected


def test_a_rank_has_the_norms_of_its_heads() -> None:
    held = {op.param: op for op in table_for(CONFIG)}
    norm = held["decoder.layers.0.self_attention.q_layernorm.weight"]
    assert norm.shard_shape(2) == (6,)
    assert norm.pieces(1, 2) == [Piece(f"{LAYER}.self_attn.q_norm.weight", 0, 6, 0, 6)]
    assert held["decoder.layers.0.self_attention.k_layernorm.weight"].shard_shape(2) == (3,)


@pytest.mark.parametrize(
    ("tp", "rank", "q", "k"),
    [(1, 0, (0, 12), (0, 6)), (2, 1, (6, 6), (3, 3)), (4, 1, (3, 3), (0, 3)), (4, 2, (6, 3), (3, 3))],
)
def test_sglang_cuts_the_norms_as_its_heads(tp: int, rank: int, q: tuple[int, int], k: tuple[int, int]) -> None:
    """With four ranks and two key-value heads, two ranks have the same head of the keys."""
    table = {op.param: op for op in server_table("sglang", CONFIG)}
    at = ShardCoordinate(tp_rank=rank, tp=tp, attn_rank=rank, attn=tp)
    for name, (start, length) in (("q", q), ("k", k)):
        op = table[f"{LAYER}.self_attn.{name}_norm.weight"]
        assert op.shape_at(at) == (length,)
        assert op.pieces_at(at) == [Piece(f"{LAYER}.self_attn.{name}_norm.weight", 0, start, 0, length)]


def test_sglang_holds_stacks_of_experts_and_float32_routers() -> None:
    table = {op.param: op for op in server_table("sglang", CONFIG)}
    assert isinstance(table[f"{LAYER}.self_attn.k_norm.weight"], KeyHeads)
    assert table[f"{MOE}.experts.w13_weight"].shape_at(ShardCoordinate()) == (2, 12, 8)
    assert table[f"{MOE}.experts.w2_weight"].shape_at(ShardCoordinate()) == (2, 8, 6)
    assert [name for name, op in table.items() if op.own_dtype] == [f"{MOE}.gate.weight"]


def test_layers_of_further_tokens_are_passed_over() -> None:
    passed = ignorable(CONFIG | {"num_mtp_modules": 2}, "actor")
    assert [n for n in range(4) if f"model.layers.{n}.self_attn.q_proj.weight" in passed] == [1, 2]
    assert f"{LAYER}.mlp.gate.weight" not in ignorable(CONFIG, "actor")
