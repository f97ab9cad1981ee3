from typing import Any

import pytest
import torch

from megarl.weights.mapping.families import table_for
from megarl.weights.mapping.names import GateUp, Rename, ShardCoordinate
from megarl.weights.mapping.server_map import coordinates, is_enlarged, server_table
from megarl.weights.mapping.sglang_ops import StackedExperts, StackedQKV, StackedRows, StackedVocab


def rows(start, stop):
    return torch.arange(start, stop, dtype=torch.float32)[:, None]


def shard(op, whole, coordinate):
    out = torch.zeros(op.shape_at(coordinate))
    for piece in op.pieces_at(coordinate):
        piece.of_shard(out).copy_(piece.of_hf(whole[piece.hf_name]))
    return out


QKV_WHOLE = {"q": rows(0, 8), "k": rows(100, 102), "v": rows(200, 202)}


@pytest.mark.parametrize(
    ("tp", "rank", "expected"),
    [
        (1, 0, [*range(8), 100, 101, 200, 201]),
        (2, 1, [4, 5, 6, 7, 101, 201]),
        (4, 0, [0, 1, 100, 200]),
        (4, 1, [2, 3, 100, 200]),
        (4, 2, [4, 5, 101, 201]),
        (8, 7, [7, 101, 201]),
    ],
)
def test_a_rank_holds_its_query_heads_and_a_copy_of_their_key_value_head(tp, rank, expected):
    op = StackedQKV("qkv", "q", "k", "v", num_heads=8, num_groups=2, head_dim=1, hidden=1)
    assert shard(op, QKV_WHOLE, ShardCoordinate(rank, tp)).flatten().tolist() == expected


def test_a_bias_has_no_columns():
    op = StackedQKV("qkv", "q", "k", "v", 4, 2, 3, None)
    assert op.shard_shape(2) == ((2 + 1 + 1) * 3,)


def test_key_value_heads_that_do_not_fit_the_ranks_are_refused():
    op = StackedQKV("qkv", "q", "k", "v", 12, 4, 1, 1)
    with pytest.raises(ValueError, match="qkv: 4 key-value heads cannot be dealt to 6 ranks"):
        op.shard_shape(6)


@pytest.mark.parametrize(("is_cut", "expected"), [(True, [2, 3, 11]), (False, [0, 1, 2, 3, 10, 11])])
def test_parts_lie_over_one_another(is_cut, expected):
    op = StackedRows("both", (("a", 4), ("b", 2)), 1, is_cut)
    whole = {"a": rows(0, 4), "b": rows(10, 12)}
    assert shard(op, whole, ShardCoordinate(1, 2)).flatten().tolist() == expected
    assert op.hf_shapes == {"a": (4, 1), "b": (2, 1)}


def test_experts_of_a_rank_are_stacked_gate_over_up():
    op = StackedExperts("w13", ("e.{}.gate", "e.{}.up"), num_experts=4, shape=(4, 1), dim=0)
    whole = {f"e.{i}.{x}": rows(10 * i + n, 10 * i + n + 4) for i in range(4) for x, n in (("gate", 0), ("up", 100))}
    coordinate = ShardCoordinate(3, 4, ep_rank=1, ep=2, etp_rank=1, etp=2)
    assert shard(op, whole, coordinate).squeeze(-1).tolist() == [[22, 23, 122, 123], [32, 33, 132, 133]]
    assert op.shape_at(coordinate) == (2, 4, 1) and op.shard_shape(2) == (4, 4, 1)


def test_down_projections_are_cut_by_columns():
    op = StackedExperts("w2", ("e.{}.down",), num_experts=2, shape=(1, 4), dim=1)
    whole = {f"e.{i}.down": rows(10 * i, 10 * i + 4).T for i in range(2)}
    assert shard(op, whole, ShardCoordinate(0, 2, etp_rank=1, etp=2)).tolist() == [[[2, 3]], [[12, 13]]]
    with pytest.raises(ValueError, match="w2: 2 experts do not divide by ep_size=4"):
        op.shape_at(ShardCoordinate(ep=4))


@pytest.mark.parametrize(
    ("vocab", "tp", "expected"),
    [(151936, 1, 151936), (151936, 4, 37984), (100, 3, 64), (100, 2, 64), (130, 2, 96), (37, 8, 8)],
)
def test_a_vocabulary_is_padded_as_sglang_does(vocab, tp, expected):
    op = StackedVocab("embed", "embed", vocab, 1)
    assert op.shard_shape(tp) == (expected, 1)
    held = [(piece.hf_start, piece.length) for rank in range(tp) for piece in op.pieces(rank, tp)]
    assert sum(length for _, length in held) == vocab
    assert held[0][0] == 0 and all(start == expected * i for i, (start, _) in enumerate(held))


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


def test_the_hf_server_holds_hf_tensors_as_they_are() -> None:
    shapes = {name: shape for op in table_for(DENSE) for name, shape in op.hf_shapes.items()}
    assert {op.param: op.shape_at(ShardCoordinate()) for op in server_table("hf", DENSE)} == shapes


def test_qwen2_in_sglang_by_hand() -> None:
    at = "model.layers.0"
    q, k, v = (f"{at}.self_attn.{x}_proj" for x in "qkv")
    qkv, mlp = f"{at}.self_attn.qkv_proj", f"{at}.mlp"
    assert server_table("sglang", DENSE) == [
        StackedVocab("model.embed_tokens.weight", "model.embed_tokens.weight", 21, 8, axis="attn"),
        Rename(f"{at}.input_layernorm.weight", f"{at}.input_layernorm.weight", (8,)),
        StackedQKV(f"{qkv}.weight", f"{q}.weight", f"{k}.weight", f"{v}.weight", 4, 2, 2, 8, axis="attn"),
        StackedQKV(f"{qkv}.bias", f"{q}.bias", f"{k}.bias", f"{v}.bias", 4, 2, 2, None, axis="attn"),
        Rename(f"{at}.self_attn.o_proj.weight", f"{at}.self_attn.o_proj.weight", (8, 8), 1, axis="attn"),
        Rename(f"{at}.post_attention_layernorm.weight", f"{at}.post_attention_layernorm.weight", (8,)),
        GateUp(f"{mlp}.gate_up_proj.weight", f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight", 12, 8),
        Rename(f"{mlp}.down_proj.weight", f"{mlp}.down_proj.weight", (8, 12), 1),
        Rename("model.norm.weight", "model.norm.weight", (8,)),
    ]


def test_the_head_of_an_untied_model_is_a_parameter_of_its_own() -> None:
    last = server_table("sglang", DENSE | {"tie_word_embeddings": False})[-1]
    assert last == StackedVocab("lm_head.weight", "lm_head.weight", 21, 8, axis="attn")


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
        ShardCoordinate(0, 4, 0, 2, 0, 2, 0, 4),
        ShardCoordinate(1, 4, 0, 2, 1, 2, 1, 4),
        ShardCoordinate(2, 4, 1, 2, 0, 2, 2, 4),
        ShardCoordinate(3, 4, 1, 2, 1, 2, 3, 4),
    ]


def test_sizes_that_sglang_rounds_up_without_a_gpu() -> None:
    aligned = DENSE | {"intermediate_size": 64}
    assert not is_enlarged("sglang", aligned, 2)
    assert is_enlarged("sglang", aligned, 4)  # 64 are not 32 for each of 4 ranks; nor are 2 heads one for each
    assert is_enlarged("sglang", DENSE, 1)
    assert not is_enlarged("hf", DENSE, 1)
