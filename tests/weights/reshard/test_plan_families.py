"""Every family's own tables, the trainer's and the server's, through descriptions as text into a plan."""

from typing import Any

import pytest
import torch
from plan_reference import UNTOUCHED, carry_out, cut_by_hand, whole_tensors

from megarl.weights.mapping.families import FAMILIES, table_for
from megarl.weights.mapping.server_map import EngineKind, server_table
from megarl.weights.reshard.describe import from_json, to_json
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding

DENSE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 21,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
SHARED = {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 4}
LATENT = SHARED | {
    "q_lora_rank": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "tie_word_embeddings": False,
}
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": LATENT,
    "kimi_k2": LATENT,
    "minimax_m2": {"num_local_experts": 4, "head_dim": 6, "tie_word_embeddings": False},
    "glm4_moe": SHARED | {"attention_bias": True, "use_qk_norm": True, "tie_word_embeddings": False},
}


SLICED = [family for family in FAMILIES if family != "gpt_oss"]  # its experts are stacked, and never sent as slices


@pytest.mark.parametrize("engine", ["hf", "sglang"])
@pytest.mark.parametrize("family", SLICED)
def test_a_familys_weights_arrive(family: str, engine: EngineKind) -> None:
    config = DENSE | {"model_type": family} | OWN.get(family, {})
    trainer = MegatronSharding(tuple(table_for(config)), world_size=8, tp=2, pp=2, ep=2, etp=1, dtype="float32")
    server = ServerSharding(tuple(server_table(engine, config)), tp=2, ep=2, num_replicas=2, dtype="float32")
    plan = Plan(from_json(to_json(trainer)), from_json(to_json(server)), min_cut_bytes=128)
    whole = whole_tensors(trainer)
    for rank, held in enumerate(carry_out(plan, whole)):
        expected = cut_by_hand(server, rank, whole, padding=UNTOUCHED)
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], expected[name]) for name in expected)
