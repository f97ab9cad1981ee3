"""DeepSeek-V3 and Kimi-K2: multi-latent attention (arXiv:2412.19437), with the experts of `experts.py`."""

from __future__ import annotations

from megarl.model_settings.experts import shared_and_routed_experts
from megarl.model_settings.hf import HFConfig, Settings, at_least, base, full_layers, need, refuse, refuse_quantized
from megarl.model_settings.rope import rope_settings


def deepseek_v3(hf: HFConfig) -> Settings:
    """Fields of MLATransformerConfig."""
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
        "qk_layernorm": True,
    }
    return base(hf) | latents | _rope(hf) | shared_and_routed_experts(hf)


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
