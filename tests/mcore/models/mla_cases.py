"""DeepSeek-V3 in small, and what a rank sees of it: plain numbers, as models need the shims, which live in ranks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter

from megarl.layout import Layout
from megarl.mcore.models.experts import router_biases
from megarl.mcore.models.mla import LatentAttention
from megarl.mcore.models.model import build_model, unwrap
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.weights.hf.export import hf_sizes, hf_tensors

# The hub's config.json of DeepSeek-V3, without its quantization_config.
REAL: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
SMALL = REAL | {
    "first_k_dense_replace": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "kv_lora_rank": 8,
    "moe_intermediate_size": 8,
    "n_group": 4,
    "n_routed_experts": 16,
    "num_attention_heads": 2,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 6,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "rms_norm_eps": 1e-3,
    "topk_group": 2,
    "v_head_dim": 6,
    "vocab_size": 40,
}


def see() -> dict[str, Any]:
    make_groups(Layout())
    try:
        model, bf16 = (unwrap(build_model(SMALL, Layout(), dtype=dtype)[0]) for dtype in ("float32", "bfloat16"))
        layer = model.decoder.layers[0]
        attention = layer.self_attention
        assert isinstance(attention, LatentAttention)
        return {
            "latent_eps": [attention.q_layernorm.eps, attention.kv_layernorm.eps],
            "other_eps": layer.input_layernorm.eps,
            "scale": attention.softmax_scale,
            "of bf16": biases(bf16),
            "as bf16": biases(model),
            "routing": route(model),
        }
    finally:
        destroy_groups()


def biases(model: GPTModel) -> dict[str, Any]:
    """A random bias, what is exported of it where the servers hold bf16, and the type of another tensor."""
    ((name, bias),) = router_biases(model)
    bias.copy_(torch.randn(16, generator=torch.Generator().manual_seed(6)))
    exported = {n: t.clone() for n, t in hf_tensors([model], SMALL, dtype=torch.bfloat16)}
    assert {n: t.dtype for n, t in exported.items()} == {
        n: dtype for n, (_, dtype) in hf_sizes([model], SMALL, dtype=torch.bfloat16).items()
    }
    of_hf = exported["model.layers.1.mlp.gate.e_score_correction_bias"]
    return {"name": name, "bias": bias.clone(), "exported": of_hf, "other": exported["lm_head.weight"].dtype}


def route(model: GPTModel) -> dict[str, torch.Tensor]:
    """50 tokens through a router with random weights and a random bias."""
    router = model.decoder.layers[1].mlp.router
    assert isinstance(router, TopKRouter)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        router.weight.copy_(torch.randn(16, 16, generator=generator))
        router.expert_bias.copy_(0.5 * torch.randn(16, generator=generator))
        hidden = torch.randn(50, 1, 16, generator=generator)
        weights, chosen = router(hidden)
        scores = (hidden[:, 0] @ router.weight.T).sigmoid()
        return {"scores": scores, "bias": router.expert_bias.clone(), "weights": weights, "chosen": chosen}
