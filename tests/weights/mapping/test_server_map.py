"""What each rank of a server holds, by hand and against slices that are cut as SGLang's layers cut them."""

from typing import Any

import pytest
import torch
from hf_configs import hf_of as config_of
from plan_reference import UNTOUCHED, carry_out, cut_by_hand, whole_tensors
from torch import Tensor

from megarl.weights.mapping.families import table_for
from megarl.weights.mapping.names import Piece, ShardCoordinate
from megarl.weights.mapping.server_map import coordinates, is_enlarged, server_table
from megarl.weights.mapping.sglang_ops import StackedExperts, StackedQKV, StackedRows, StackedVocab
from megarl.weights.reshard.describe import from_json, to_json
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding
from megarl.weights.verify.digests import RankDigests, digest


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


def test_heads_experts_and_groups_that_do_not_fit_the_ranks_are_refused():
    op = StackedQKV("qkv", "q", "k", "v", 12, 4, 1, 1)
    with pytest.raises(ValueError, match="qkv: 4 key-value heads cannot be dealt to 6 ranks"):
        op.shard_shape(6)
    experts = StackedExperts("w2", ("e.{}.down",), num_experts=2, shape=(1, 4), dim=1)
    with pytest.raises(ValueError, match="w2: 2 experts do not divide by ep_size=4"):
        experts.shape_at(ShardCoordinate(ep=4))
    with pytest.raises(ValueError, match="attention_dp=3 does not divide its tp_size=4"):
        ServerSharding((), tp=4, attention_dp=3)


def test_parts_lie_over_one_another():
    op = StackedRows("both", (("a", 4), ("b", 2)), 1)
    whole = {"a": rows(0, 4), "b": rows(10, 12)}
    assert shard(op, whole, ShardCoordinate(1, 2)).flatten().tolist() == [0, 1, 2, 3, 10, 11]
    assert op.hf_shapes == {"a": (4, 1), "b": (2, 1)}


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


DENSE = config_of("qwen2", hidden_size=8, num_hidden_layers=1, intermediate_size=12, vocab_size=21)


def test_biases_of_queries_keys_and_values_are_stacked_as_their_rows() -> None:
    table, own = server_table("sglang", DENSE), "model.layers.0.self_attn"
    names = [f"{own}.{name}_proj.bias" for name in ("qkv", "q", "k", "v")]
    assert StackedQKV(*names, 4, 2, 2, None, axis="attn") in table
    assert table[-1] == StackedVocab("lm_head.weight", "lm_head.weight", 21, 8, axis="attn")
    assert server_table("sglang", DENSE | {"tie_word_embeddings": True}) == table[:-1]


def test_queries_without_a_latent_of_their_own_are_fused_with_nothing() -> None:
    table = {op.param: op for op in server_table("sglang", config_of("deepseek_v3_plain"))}
    at = ShardCoordinate(tp_rank=1, tp=2, attn_rank=1, attn=2)
    own = "model.layers.1.self_attn"
    assert table[f"{own}.q_proj.weight"].shape_at(at) == (24, 32)
    assert table[f"{own}.kv_a_proj_with_mqa.weight"].shape_at(at) == (24, 32)


@pytest.mark.parametrize(
    ("tp", "rank", "q", "k"),
    [(1, 0, (0, 12), (0, 6)), (2, 1, (6, 6), (3, 3)), (4, 1, (3, 3), (0, 3)), (4, 2, (6, 3), (3, 3))],
)
def test_norms_over_all_heads_are_cut_as_the_heads(tp: int, rank: int, q: tuple[int, int], k: tuple[int, int]) -> None:
    """With four ranks and two key-value heads, two ranks have the same head of the keys."""
    table = {op.param: op for op in server_table("sglang", config_of("minimax_m2", head_dim=3))}
    at = ShardCoordinate(tp_rank=rank, tp=tp, attn_rank=rank, attn=tp)
    for name, (start, length) in (("q", q), ("k", k)):
        op = table[f"model.layers.0.self_attn.{name}_norm.weight"]
        assert op.shape_at(at) == (length,)
        assert op.pieces_at(at) == [Piece(f"model.layers.0.self_attn.{name}_norm.weight", 0, start, 0, length)]


def test_stacks_of_experts_of_other_names() -> None:
    table = {op.param: op for op in server_table("sglang", config_of("minimax_m2", num_local_experts=2))}
    shapes = [
        table[f"model.layers.0.block_sparse_moe.experts.{x}_weight"].shape_at(ShardCoordinate()) for x in ("w13", "w2")
    ]
    assert shapes == [(2, 48, 32), (2, 32, 24)]


def test_a_model_with_stacks_is_told_by_the_names_of_its_folder() -> None:
    config = config_of("gpt_oss")
    assert server_table("sglang", config) == server_table("hf", config)


DELTA = {
    **{"hidden_size": 1, "num_hidden_layers": 2, "intermediate_size": 2, "vocab_size": 8, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 1, "linear_value_head_dim": 2, "linear_conv_kernel_dim": 3},
    "layer_types": ["linear_attention", "full_attention"],
}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_a_rank_holds_the_heads_of_a_gated_delta_net(family: str) -> None:
    """The second of two ranks, whose head of keys serves the last two of four heads of values."""
    table = {op.param: op for op in server_table("sglang", DELTA | {"model_type": family})}
    own, at = "model.layers.0.linear_attn", ShardCoordinate(1, 2, attn_rank=1, attn=2)

    def held(name: str, *parts: str) -> list[float]:
        op = table[f"{own}.{name}"]
        whole = {each: torch.arange(shape[0]).float().view(-1, 1) for each, shape in op.hf_shapes.items()}
        whole = {each: rows.expand(op.hf_shapes[each][:1] + op.hf_shapes[each][1:2]) for each, rows in whole.items()}
        numbers = {f"{own}.{part}": 100.0 * i for i, part in enumerate(parts or (name,))}
        assert numbers.keys() == whole.keys()
        return shard(op, {each: whole[each] + numbers[each] for each in whole}, at).flatten().tolist()

    if family == "qwen3_next":  # its rows are those of one head of keys after the other
        assert held("in_proj_qkvz.weight") == [*range(10, 20)]
        assert held("in_proj_ba.weight") == [*range(4, 8)]
    else:  # q, k and v; then z
        parts = ("in_proj_qkv.weight", "in_proj_z.weight")
        assert held("in_proj_qkvz.weight", *parts) == [1, 3, 8, 9, 10, 11, 104, 105, 106, 107]
        assert held("in_proj_ba.weight", "in_proj_b.weight", "in_proj_a.weight") == [2, 3, 102, 103]
    conv = table[f"{own}.conv1d.weight"]
    assert [(p.hf_start, p.shard_start, p.length) for p in conv.pieces_at(at)] == [(1, 0, 1), (3, 1, 1), (8, 2, 4)]
    assert conv.shape_at(at) == (6, 1, 3)
    assert table[f"{own}.out_proj.weight"].pieces_at(at) == [Piece(f"{own}.out_proj.weight", 1, 4, 0, 4)]
    assert [table[f"{own}.{name}"].shape_at(at) for name in ("A_log", "dt_bias", "norm.weight")] == [(2,), (2,), (2,)]
    # Attention: two heads with a gate each, under names without the module's.
    hf = [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
    assert table["model.layers.1.qkv_proj.weight"].pieces_at(at) == [
        Piece(name, 0, start, place, rows)
        for name, start, place, rows in zip(hf, (4, 0, 0), (0, 4, 6), (4, 2, 2), strict=True)
    ]
    assert table["model.layers.1.q_norm.weight"].shape_at(at) == (2,)


def test_sizes_that_sglang_rounds_up_without_a_gpu() -> None:
    aligned = DENSE | {"intermediate_size": 64}
    assert not is_enlarged("sglang", aligned, 2)
    assert is_enlarged("sglang", aligned, 4)  # 64 are not 32 for each of 4 ranks; nor are 2 heads one for each
    assert is_enlarged("sglang", DENSE, 1)
    heads = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
    assert not is_enlarged("sglang", aligned | heads, 1) and is_enlarged("sglang", aligned | heads, 2)
    assert is_enlarged("sglang", aligned | {"shared_expert_intermediate_size": 48}, 1)
    assert not is_enlarged("hf", DENSE, 1)


# attention data parallelism, against slices made the plain way


SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 12,
    "moe_intermediate_size": 8,
    "vocab_size": 70,
}
GROUPED = config_of("qwen3_moe", **SIZES, head_dim=4, num_experts=4, mlp_only_layers=[0])
LATENT = config_of("deepseek_v3", **SIZES, q_lora_rank=6, kv_lora_rank=10, n_routed_experts=4)


def stock(config: dict[str, Any], whole: dict[str, Tensor], rank: int, tp: int, ep: int, dp: int) -> dict[str, Tensor]:
    """The parameters of a rank as SGLang's layers cut them: attn_tp_group has tp / dp ranks, experts tp / ep."""
    group, etp, held = tp // dp, tp // ep, {}
    padded = 128  # the vocabulary, rounded up to a multiple of 64 that the ranks of every group here divide

    def part(tensor: Tensor, at: int, of: int, dim: int = 0) -> Tensor:
        return tensor.tensor_split(of, dim)[at]

    def attention(name: str, dim: int = 0) -> Tensor:
        return part(whole[name], rank % group, group, dim)

    for table in ("model.embed_tokens.weight", "lm_head.weight"):
        filled = torch.full((padded, 8), UNTOUCHED)
        filled[:70] = whole[table]
        held[table] = part(filled, rank % group, group)
    held["model.norm.weight"] = whole["model.norm.weight"]
    for layer in range(2):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            held[f"{at}.{norm}.weight"] = whole[f"{at}.{norm}.weight"]
        own = f"{at}.self_attn"
        held[f"{own}.o_proj.weight"] = attention(f"{own}.o_proj.weight", 1)
        if config is LATENT:
            latents = [whole[f"{own}.{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
            held[f"{own}.fused_qkv_a_proj_with_mqa.weight"] = torch.cat(latents)
            for name in ("q_a_layernorm", "kv_a_layernorm"):
                held[f"{own}.{name}.weight"] = whole[f"{own}.{name}.weight"]
            for name in ("q_b_proj", "kv_b_proj"):
                held[f"{own}.{name}.weight"] = attention(f"{own}.{name}.weight")
        else:  # 4 heads of queries and 2 of keys and values, each of 4 rows: a group of 4 ranks holds each pair twice
            q = attention(f"{own}.q_proj.weight")
            pairs = min(group, 2)
            k, v = (part(whole[f"{own}.{x}_proj.weight"], rank % group * pairs // group, pairs) for x in "kv")
            held[f"{own}.qkv_proj.weight"] = torch.cat([q, k, v])
            for name in ("q_norm", "k_norm"):
                held[f"{own}.{name}.weight"] = whole[f"{own}.{name}.weight"]
        mlp = f"{at}.mlp"
        dense = {0: mlp} if layer == 0 else ({1: f"{mlp}.shared_experts"} if config is LATENT else {})
        for name in dense.values():  # over all ranks of the server
            gate_up = [part(whole[f"{name}.{x}_proj.weight"], rank, tp) for x in ("gate", "up")]
            held[f"{name}.gate_up_proj.weight"] = torch.cat(gate_up)
            held[f"{name}.down_proj.weight"] = part(whole[f"{name}.down_proj.weight"], rank, tp, 1)
        if layer == 1:
            held[f"{mlp}.gate.weight"] = whole[f"{mlp}.gate.weight"]
            if config is LATENT:
                held[f"{mlp}.gate.e_score_correction_bias"] = whole[f"{mlp}.gate.e_score_correction_bias"]
            w13, w2 = [], []
            for number in torch.arange(4).tensor_split(ep)[rank // etp].tolist():
                gate, up, down = (whole[f"{mlp}.experts.{number}.{x}_proj.weight"] for x in ("gate", "up", "down"))
                w13.append(torch.cat([part(gate, rank % etp, etp), part(up, rank % etp, etp)]))
                w2.append(part(down, rank % etp, etp, 1))
            held[f"{mlp}.experts.w13_weight"], held[f"{mlp}.experts.w2_weight"] = torch.stack(w13), torch.stack(w2)
    return held


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("config", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_each_rank_holds_what_stock_layers_cut_for_it(config: dict[str, Any], ep: int, dp: int) -> None:
    table = tuple(server_table("sglang", config))
    server = ServerSharding(table, tp=4, ep=ep, attention_dp=dp, dtype="float32")
    trainer = MegatronSharding(tuple(table_for(config)), world_size=4, tp=2, pp=2, dtype="float32")
    whole = whole_tensors(trainer)
    plan = Plan(from_json(to_json(trainer)), from_json(to_json(server)))
    sent = carry_out(plan, whole)  # what arrives in a sharded push
    types = dict.fromkeys(whole, torch.float32)
    for rank in range(4):
        expected = stock(config, whole, rank, 4, ep, dp)
        cut = cut_by_hand(server, rank, whole, padding=UNTOUCHED)
        digests = RankDigests(table, coordinates(4, ep, dp)[rank], types, "sha256")  # of whole tensors
        for name, tensor in whole.items():
            digests.add(name, tensor)
        held = digests.result()
        assert cut.keys() == sent[rank].keys() == held.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(cut[name], tensor) and torch.equal(sent[rank][name], tensor), (rank, name)
            assert held[name] == digest(tensor.where(tensor != UNTOUCHED, torch.zeros(()))), (rank, name)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            (4, 2),
            [(0, 4, 0, 2, 0, 2, 0, 4), (1, 4, 0, 2, 1, 2, 1, 4), (2, 4, 1, 2, 0, 2, 2, 4), (3, 4, 1, 2, 1, 2, 3, 4)],
        ),
        ((2, 1, 2), [(0, 2, 0, 1, 0, 2, 0, 1), (1, 2, 0, 1, 1, 2, 0, 1)]),
    ],
)
def test_the_coordinates_of_a_servers_ranks(sizes: tuple[int, ...], expected: list[tuple[int, ...]]) -> None:
    assert coordinates(*sizes) == [ShardCoordinate(*numbers) for numbers in expected]
