"""Megatron's settings of each family's models, read from config.json.

A family is added by one entry of SETTINGS, and one in `mcore/models/families.py`.  Settings of a family's modelling
code that are not implemented here raise a ValueError of one sentence, so training and serving always compute the same.
"""

from __future__ import annotations

from collections.abc import Callable

from megarl.arch.layout import dense_layers
from megarl.arch.model_types import checked
from megarl.arch.settings.experts import shared_and_routed_experts, sigmoid_experts, softmax_experts
from megarl.arch.settings.gated_delta import gated_delta, gated_shared_expert
from megarl.arch.settings.hf import (
    HFConfig,
    Settings,
    at_least,
    base,
    full_layers,
    head_dim,
    in_groups,
    need,
    refuse,
    refuse_quantized,
    window,
)
from megarl.arch.settings.mamba import nemotron_h
from megarl.arch.settings.rope import make_rope, rope_settings
from megarl.arch.settings.sparse_latent import sparse_latent

SLIDING, FULL = "sliding_attention", "full_attention"
SWIGLU_ALPHA = 1.702  # of gpt-oss; Megatron's quick_gelu has no other


def settings_of(hf: HFConfig) -> Settings:
    """Fields of Megatron's TransformerConfig for a config.json that `hf_config.completed` returned.

    Raises ValueError of one sentence for a family or mathematics that the trainer does not have.
    """
    return SETTINGS[checked(hf.get("model_type"), SETTINGS)](hf)


def dense(hf: HFConfig, *, qkv_bias: bool = False, qk_norm: bool = False) -> Settings:
    """Decoders like Llama's: grouped-query attention, a gated feed-forward, RMS norms before both."""
    refuse(hf, attention_bias=qkv_bias, mlp_bias=False)
    (_, groups), dim = in_groups(hf, "num_attention_heads", "num_key_value_heads"), head_dim(hf)
    # Scaling q and k by a factor scales their products by its square.
    factor = make_rope(hf, dim).factor
    return base(hf) | {
        "num_query_groups": groups,
        "kv_channels": dim,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
        "softmax_scale": None if factor == 1.0 else dim**-0.5 * factor**2,
    }


def full_attention(hf: HFConfig) -> Settings:
    """Refuse Qwen's sliding windows, which only some layers have."""
    full_layers(hf)
    if (size := hf.get("sliding_window")) is not None:  # the class has it only with use_sliding_window
        raise ValueError(
            f"config.json: use_sliding_window=true is not supported with sliding_window={size}; expected false"
        )
    return {}


def _llama(hf: HFConfig) -> Settings:
    full_layers(hf)
    return dense(hf)


def windowed(hf: HFConfig) -> Settings:
    """Mistral's window, the same in every layer, or none in any; layers of both kinds are refused."""
    kinds = sorted(set(hf.get("layer_types") or ()))
    if kinds not in ([], [FULL], [SLIDING]):
        raise ValueError(f"config.json: layer_types holds {' and '.join(kinds)}; expected {FULL} or {SLIDING} only")
    return {} if kinds != [SLIDING] and hf.get("sliding_window") is None else {"window_size": window(hf)}


def _qwen2(hf: HFConfig) -> Settings:
    """Qwen2's code adds biases to q, k and v and ignores attention_bias."""
    return dense({**hf, "attention_bias": True}, qkv_bias=True) | full_attention(hf)


def _qwen3(hf: HFConfig) -> Settings:
    return dense(hf, qk_norm=True) | full_attention(hf)


def _mistral(hf: HFConfig) -> Settings:
    return dense(hf) | windowed(hf)


def _qwen3_moe(hf: HFConfig) -> Settings:
    at_least(1, hf, "decoder_sparse_step")
    ffn, renormalised = need(hf, "moe_intermediate_size"), bool(hf["norm_topk_prob"])
    return _qwen3(hf) | softmax_experts(hf, ffn=ffn, renormalised=renormalised)


def _mixtral(hf: HFConfig) -> Settings:
    settings = _mistral(hf)
    return settings | softmax_experts(hf, ffn=settings["ffn_hidden_size"], renormalised=True)


def _qwen3_next(hf: HFConfig) -> Settings:
    at_least(1, hf, "decoder_sparse_step")
    settings = gated_delta(dense(hf, qk_norm=True), hf)
    if not hf["num_experts"] or len(dense_layers(hf)) == hf["num_hidden_layers"]:
        return settings
    return settings | gated_shared_expert(hf, renormalised=bool(hf["norm_topk_prob"]))


def _qwen3_5_text(hf: HFConfig) -> Settings:
    return gated_delta(dense(hf, qk_norm=True), hf)


def _qwen3_5_moe_text(hf: HFConfig) -> Settings:
    """Its folders name no size of a dense feed-forward: no layer has one."""
    of_expert = {**hf, "intermediate_size": need(hf, "moe_intermediate_size")}
    return gated_delta(dense(of_expert, qk_norm=True), hf) | gated_shared_expert(hf, renormalised=True)


def _glm4_moe(hf: HFConfig) -> Settings:
    """GLM-4.5: grouped-query attention whose biases and norms config.json decides on, and DeepSeek-V3's experts."""
    refuse_quantized(hf)
    full_layers(hf)
    attention = dense(hf, qkv_bias=bool(hf.get("attention_bias")), qk_norm=bool(hf.get("use_qk_norm")))
    return attention | shared_and_routed_experts(hf)


def _minimax_m2(hf: HFConfig) -> Settings:
    """MiniMax-M2: experts in every layer, chosen by biased sigmoid scores; its norms are those of its layers."""
    refuse_quantized(hf)
    full_layers(hf)
    refuse(hf, use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True, shared_intermediate_size=0)
    refuse(hf, sliding_window=None, router_jitter_noise=0.0, routed_scaling_factor=1.0)
    if other := sorted(set(hf.get("attn_type_list") or ()) - {1}):
        raise ValueError(f"config.json: attn_type_list holds {other[0]}; expected 1 only, which is full attention")
    settings = dense(hf)
    count, ffn = need(hf, "num_local_experts"), settings["ffn_hidden_size"]
    return settings | sigmoid_experts(hf, count=count, ffn=ffn)


def _gpt_oss(hf: HFConfig) -> Settings:
    return gpt_oss(hf, dense(hf, qkv_bias=True))


def gpt_oss(hf: HFConfig, attention: Settings) -> Settings:
    """gpt-oss (arXiv:2508.10925): attention sinks, windows in every second layer, and experts with biases.

    Each head has a sink: a learnt score beside those of the keys in the softmax, without a value.  An expert computes
    (up + 1) * gate * sigmoid(1.702 gate), where gate is limited from above and up on both sides.
    `attention`: the settings of grouped-query attention with biases of q, k and v.

    Weights in mxfp4 are read as the bfloat16 numbers that they stand for (weights/hf/unstacked.py).
    """
    method = (hf.get("quantization_config") or {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise ValueError(f"config.json: quantization_config says quant_method={method!r}; expected mxfp4 or none")
    refuse(hf, swiglu_alpha=SWIGLU_ALPHA, hidden_act_alpha=SWIGLU_ALPHA)
    return (
        attention
        | softmax_experts(hf, ffn=need(hf, "intermediate_size"), renormalised=True)
        | _windows(hf)
        | {
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "activation_func_clamp_value": float(need(hf, "swiglu_limit")),
            "glu_linear_offset": 1.0,
        }
    )


def _windows(hf: HFConfig) -> Settings:
    """Those of the layers of the kind `sliding_attention`."""
    kinds = need(hf, "layer_types")
    if other := sorted(set(kinds) - {SLIDING, FULL}):
        raise ValueError(f"config.json: layer_types holds {other[0]}; expected {SLIDING} and {FULL} only")
    if SLIDING not in kinds:
        return {}
    return {
        "window_size": window(hf),
        "window_attn_skip_freq": [int(kind == SLIDING) for kind in kinds],  # despite its name: 1 has a window
    }


def deepseek_v3(hf: HFConfig) -> Settings:
    """DeepSeek-V3 and Kimi-K2 (arXiv:2412.19437): fields of MLATransformerConfig."""
    refuse(hf, attention_bias=False, rope_interleave=True, num_key_value_heads=need(hf, "num_attention_heads"))
    at_least(1, hf, "head_dim")
    refuse(hf, head_dim=need(hf, "qk_rope_head_dim"))
    refuse_quantized(hf)
    full_layers(hf)
    latents = {
        "q_lora_rank": hf["q_lora_rank"],  # None: queries directly from the hidden state
        "kv_lora_rank": need(hf, "kv_lora_rank"),
        "qk_head_dim": need(hf, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": need(hf, "qk_rope_head_dim"),
        "v_head_dim": need(hf, "v_head_dim"),
        "qk_layernorm": hf["q_lora_rank"] is not None,  # see LatentAttention
    }
    return base(hf) | latents | _rope(hf) | shared_and_routed_experts(hf)


def _sparse_latent(hf: HFConfig) -> Settings:
    """Its class gives head_dim no meaning of its own."""
    plain = {key: value for key, value in hf.items() if key != "layer_types"}
    return sparse_latent(deepseek_v3(plain), hf)


def _rope(hf: HFConfig) -> Settings:
    """Megatron's multi-latent attention makes its own rope: plain, or YaRN, whose factor also scales the softmax."""
    settings = rope_settings(hf)
    refuse(settings, partial_rotary_factor=1.0)
    kind, theta = settings["rope_type"], float(need(settings, "rope_theta"))
    if kind == "default":
        return {"rope_type": "rope", "rotary_base": theta}
    if kind != "yarn":
        raise ValueError(
            f"config.json: rope type {kind!r} is not supported by {hf['model_type']}; expected default or yarn"
        )
    over, under = settings.get("mscale"), settings.get("mscale_all_dim")
    if bool(over) != bool(under) or settings.get("attention_factor") is not None or not settings.get("truncate", True):
        raise ValueError(
            "config.json: rope type 'yarn' needs both of mscale and mscale_all_dim or neither, no attention_factor, "
            f"and truncate=true; has mscale={over}, mscale_all_dim={under}, "
            f"attention_factor={settings.get('attention_factor')}, truncate={settings.get('truncate', True)}"
        )
    return {
        "rope_type": "yarn",
        "rotary_base": theta,
        "rotary_scaling_factor": float(need(hf["rope_parameters"], "factor")),
        "original_max_position_embeddings": need(settings, "original_max_position_embeddings"),
        "beta_fast": float(settings.get("beta_fast") or 32),
        "beta_slow": float(settings.get("beta_slow") or 1),
        "mscale": float(over or 1.0),
        "mscale_all_dim": float(under or 0.0),
    }


SETTINGS: dict[str, Callable[[HFConfig], Settings]] = {
    "qwen2": _qwen2,  # and Qwen2.5
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5_text,  # of Qwen3.5 to 3.8
    "qwen3_5_moe_text": _qwen3_5_moe_text,
    "llama": _llama,  # Llama 2 and 3
    "mistral": _mistral,
    "mixtral": _mixtral,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "deepseek_v32": _sparse_latent,
    "glm_moe_dsa": _sparse_latent,  # GLM-5
    "glm4_moe": _glm4_moe,  # GLM-4.5 and its Air, GLM-4.6
    "minimax_m2": _minimax_m2,
    "gpt_oss": _gpt_oss,
    "nemotron_h": nemotron_h,  # and Nemotron-3
}
