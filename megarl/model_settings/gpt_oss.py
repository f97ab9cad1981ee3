"""gpt-oss (arXiv:2508.10925): attention sinks, windows in every second layer, and experts with biases.

Each head has a sink: a learnt score beside those of the keys in the softmax, without a value.  An expert computes
(up + 1) * gate * sigmoid(1.702 gate), where gate is limited from above and up on both sides.
"""

from __future__ import annotations

from megarl.model_settings.experts import softmax_experts
from megarl.model_settings.hf import HFConfig, Settings, need, refuse, window

SLIDING, FULL = "sliding_attention", "full_attention"
SWIGLU_ALPHA = 1.702  # Megatron's quick_gelu has no other


def gpt_oss(hf: HFConfig, attention: Settings) -> Settings:
    """`attention`: the settings of grouped-query attention with biases of q, k and v.

    Weights in mxfp4 are read as the bfloat16 numbers that they stand for (weights/hf/mxfp4.py).
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
