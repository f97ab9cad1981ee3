"""Nemotron-H and Nemotron-3: layers that are one thing each, a Mamba-2 mixer, attention, a feed-forward or experts."""

from __future__ import annotations

from megarl.arch.layers import EXPERTS, LINEAR
from megarl.arch.settings.experts import grouped_experts
from megarl.arch.settings.hf import HFConfig, Settings, at_least, base, in_groups, need, refuse, refuse_quantized


def nemotron_h(hf: HFConfig) -> Settings:
    """arXiv:2504.03624; its attention has no positions.

    Its feed-forwards are relu(x)^2 without a gate: an activation of Megatron's, which is set where Megatron is loaded.
    """
    kinds = list(need(hf, "layers_block_type"))
    if LINEAR not in kinds:
        raise ValueError(f"config.json: layers_block_type holds no {LINEAR}; expected some layers with a Mamba mixer")
    refuse_quantized(hf)
    refuse(hf, mlp_hidden_act="relu2", mamba_hidden_act="silu", sliding_window=None, residual_in_fp32=False)
    refuse(hf, attention_bias=False, mlp_bias=False, mamba_proj_bias=False, use_bias=False, use_conv_bias=True)
    refuse(hf, tie_word_embeddings=False)
    at_least(1, hf, "chunk_size")
    if list(hf.get("time_step_limit") or ()) not in ([], [0.0, float("inf")]):
        raise ValueError(f"config.json: time_step_limit={hf['time_step_limit']} is not supported; expected none")
    heads, of_heads = in_groups(hf, "num_attention_heads", "num_key_value_heads")
    mixers, of_mixers = in_groups(hf, "mamba_num_heads", "n_groups")
    settings = base({**hf, "rms_norm_eps": hf["layer_norm_epsilon"]}) | {
        "layer_kinds": kinds,
        "gated_linear_unit": False,
        "num_attention_heads": heads,
        "num_query_groups": of_heads,
        "kv_channels": at_least(1, hf, "head_dim"),
        "linear_conv_kernel_dim": at_least(1, hf, "conv_kernel"),
        "mamba_state_dim": at_least(1, hf, "ssm_state_size"),
        "mamba_head_dim": at_least(1, hf, "mamba_head_dim"),
        "mamba_num_groups": of_mixers,
        "mamba_num_heads": mixers,
    }
    return settings | _experts(hf) if EXPERTS in kinds else settings


def _experts(hf: HFConfig) -> Settings:
    """Routed ones, which may see a projection of the hidden state to a smaller latent, beside a shared one."""
    refuse(hf, n_shared_experts=1)
    shared = at_least(1, hf, "moe_shared_expert_intermediate_size")
    settings = grouped_experts(hf) | {"moe_shared_expert_intermediate_size": shared}
    if hf["moe_latent_size"] is not None:
        settings["moe_latent_size"] = at_least(1, hf, "moe_latent_size")
    return settings
