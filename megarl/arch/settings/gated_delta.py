"""Qwen3-Next, and the text part of Qwen3.5 to 3.8: gated delta nets in most layers, gated attention in the others."""

from __future__ import annotations

from megarl.arch.settings.experts import softmax_experts
from megarl.arch.settings.hf import HFConfig, Settings, at_least, in_groups, need, refuse

LINEAR, FULL = "linear_attention", "full_attention"


def gated_delta(attention: Settings, hf: HFConfig) -> Settings:
    """`attention`: the settings of the layers with grouped-query attention and the dense feed-forward."""
    kinds = need(hf, "layer_types")
    if other := sorted(set(kinds) - {LINEAR, FULL}):
        raise ValueError(f"config.json: layer_types holds {other[0]}; expected {LINEAR} and {FULL} only")
    refuse(hf, attn_output_gate=True)  # SGLang alone reads this key and the next
    if (gate := hf.get("output_gate_type")) not in (None, "silu", "swish"):
        raise ValueError(f"config.json: output_gate_type={gate} is not supported; expected silu, also called swish")
    values, keys = in_groups(hf, "linear_num_value_heads", "linear_num_key_heads")
    return attention | {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == LINEAR) for kind in kinds],
        "linear_conv_kernel_dim": at_least(1, hf, "linear_conv_kernel_dim"),
        "linear_key_head_dim": at_least(1, hf, "linear_key_head_dim"),
        "linear_value_head_dim": at_least(1, hf, "linear_value_head_dim"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
    }


def gated_shared_expert(hf: HFConfig, *, renormalised: bool) -> Settings:
    """Routed experts, and a shared one whose output is scaled by a gate of its own."""
    return softmax_experts(hf, ffn=need(hf, "moe_intermediate_size"), renormalised=renormalised) | {
        "moe_shared_expert_intermediate_size": at_least(1, hf, "shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }
