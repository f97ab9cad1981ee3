"""What each rank of an SGLang server with attention data parallelism holds, against slices made the plain way."""

from typing import Any

import pytest
import torch
from plan_reference import UNTOUCHED, carry_out, cut_by_hand, whole_tensors
from torch import Tensor

from megarl.weights.mapping.families import table_for
from megarl.weights.mapping.names import ShardCoordinate
from megarl.weights.mapping.server_map import coordinates, server_table
from megarl.weights.reshard.describe import from_json, to_json
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding
from megarl.weights.verify.digests import RankDigests, digest

COMMON: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 12,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 70,
    "tie_word_embeddings": False,
}
GROUPED = COMMON | {"model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 4, "num_experts": 4}
GROUPED |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0]}
LATENT = COMMON | {"model_type": "deepseek_v3", "q_lora_rank": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 4}
LATENT |= {"qk_rope_head_dim": 2, "v_head_dim": 3, "first_k_dense_replace": 1, "n_routed_experts": 4}
LATENT |= {"n_shared_experts": 2}


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


def test_the_coordinates_of_attention_groups() -> None:
    assert coordinates(4, 1, 2) == [
        ShardCoordinate(0, 4, 0, 1, 0, 4, 0, 2),
        ShardCoordinate(1, 4, 0, 1, 1, 4, 1, 2),
        ShardCoordinate(2, 4, 0, 1, 2, 4, 0, 2),
        ShardCoordinate(3, 4, 0, 1, 3, 4, 1, 2),
    ]


def test_groups_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="attention_dp=3 does not divide its tp_size=4"):
        ServerSharding((), tp=4, attention_dp=3)
