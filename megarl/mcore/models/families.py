"""Model families: Megatron's settings of a model, read from its config.json.

A family is added by one entry of FAMILIES; `model.py` knows none of them by name.  Settings of a family's modelling
code that are not implemented here raise a ValueError of one sentence, so training and serving always compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.mcore.models.experts import shared_and_routed_experts, sigmoid_experts, softmax_experts
from megarl.mcore.models.gpt_oss import gpt_oss
from megarl.mcore.models.hf import HFConfig, Settings, base, head_dim, need, refuse, refuse_quantized
from megarl.mcore.models.layers import LayerSpec, local_layer
from megarl.mcore.models.mla import deepseek_v3, latent_layer
from megarl.mcore.models.qk_norm import layer_with_norms_of_all_heads
from megarl.mcore.models.rope import make_rope
from megarl.model_types import refusal


@dataclass(frozen=True)
class Family:
    """How models of one `model_type` are built."""

    settings: Callable[[HFConfig], Settings]  # fields of `config`; ValueError of one sentence if not supported
    config: type[TransformerConfig] = TransformerConfig
    layer: LayerSpec = local_layer


def family_of(hf: HFConfig) -> Family:
    """Raises ValueError for a model_type that is not in FAMILIES."""
    model_type = hf.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(refusal(model_type, FAMILIES))
    return FAMILIES[model_type]


def dense(hf: HFConfig, *, qkv_bias: bool = False, qk_norm: bool = False) -> Settings:
    """Decoders like Llama's: grouped-query attention, a gated feed-forward, RMS norms before both."""
    refuse(hf, attention_bias=qkv_bias, mlp_bias=False)
    dim = head_dim(hf)
    # Scaling q and k by a factor scales their products by its square.
    factor = make_rope(hf, dim).factor
    return base(hf) | {
        "num_query_groups": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "kv_channels": dim,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
        "softmax_scale": None if factor == 1.0 else dim**-0.5 * factor**2,
    }


def full_attention(hf: HFConfig) -> Settings:
    """Refuse Qwen's sliding windows, which only some layers have."""
    refuse(hf, use_sliding_window=False)
    if other := sorted(set(hf.get("layer_types") or ()) - {"full_attention"}):
        raise ValueError(f"config.json: layer_types holds {', '.join(other)}; expected full_attention only")
    return {}


def windowed(hf: HFConfig) -> Settings:
    """Mistral's window, the same in every layer: a token attends to itself and the `sliding_window` - 1 before it."""
    size = hf.get("sliding_window")
    return {} if size is None else {"window_size": (size - 1, 0)}


def _qwen(hf: HFConfig, *, qkv_bias: bool, qk_norm: bool) -> Settings:
    return dense(hf, qkv_bias=qkv_bias, qk_norm=qk_norm) | full_attention(hf)


def _mistral(hf: HFConfig) -> Settings:
    return dense(hf) | windowed(hf)


def sparse_layers(hf: HFConfig) -> list[int]:
    """Qwen3-MoE: 1 for every decoder_sparse_step-th layer that is not in mlp_only_layers, else 0."""
    step, plain = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers") or ()
    return [int((i + 1) % step == 0 and i not in plain) for i in range(hf["num_hidden_layers"])]


def _qwen3_moe(hf: HFConfig) -> Settings:
    layers = sparse_layers(hf)
    if not any(layers):
        raise ValueError("config.json: decoder_sparse_step and mlp_only_layers leave no layer experts; expected qwen3")
    return _qwen(hf, qkv_bias=False, qk_norm=True) | softmax_experts(
        hf,
        ffn=need(hf, "moe_intermediate_size"),
        renormalised=bool(hf.get("norm_topk_prob", False)),
        layers=1 if all(layers) else layers,
    )


def _mixtral(hf: HFConfig) -> Settings:
    settings = _mistral(hf)
    return settings | softmax_experts(hf, ffn=settings["ffn_hidden_size"], renormalised=True)


def _glm4_moe(hf: HFConfig) -> Settings:
    """GLM-4.5: grouped-query attention whose biases and norms config.json decides on, and DeepSeek-V3's experts."""
    refuse_quantized(hf)
    attention = dense(hf, qkv_bias=bool(hf.get("attention_bias")), qk_norm=bool(hf.get("use_qk_norm")))
    return attention | shared_and_routed_experts(hf)


def _minimax_m2(hf: HFConfig) -> Settings:
    """MiniMax-M2: experts in every layer, chosen by biased sigmoid scores; its norms are those of its layers."""
    refuse_quantized(hf)
    refuse(hf, use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True, shared_intermediate_size=0)
    refuse(hf, sliding_window=None, router_jitter_noise=0.0, routed_scaling_factor=1.0)
    if other := sorted(set(hf.get("attn_type_list") or ()) - {1}):
        raise ValueError(f"config.json: attn_type_list holds {other[0]}; expected 1 only, which is full attention")
    settings = dense(hf)
    count, ffn = need(hf, "num_local_experts", "num_experts"), settings["ffn_hidden_size"]
    return settings | sigmoid_experts(hf, count=count, ffn=ffn)


def _gpt_oss(hf: HFConfig) -> Settings:
    return gpt_oss(hf, dense(hf, qkv_bias=True))


FAMILIES: dict[str, Family] = {
    "qwen2": Family(partial(_qwen, qkv_bias=True, qk_norm=False)),  # Qwen2, Qwen2.5
    "qwen3": Family(partial(_qwen, qkv_bias=False, qk_norm=True)),
    "qwen3_moe": Family(_qwen3_moe),
    "llama": Family(dense),  # Llama 2 and 3
    "mistral": Family(_mistral),
    "mixtral": Family(_mixtral),
    "deepseek_v3": Family(deepseek_v3, MLATransformerConfig, latent_layer),
    "kimi_k2": Family(deepseek_v3, MLATransformerConfig, latent_layer),
    "glm4_moe": Family(_glm4_moe),  # GLM-4.5 and its Air, GLM-4.6
    "minimax_m2": Family(_minimax_m2, layer=layer_with_norms_of_all_heads),
    "gpt_oss": Family(_gpt_oss),
}
