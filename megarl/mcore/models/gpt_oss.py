"""gpt-oss (arXiv:2508.10925): attention sinks, windows in every second layer, and experts with biases.

Each head has a sink: a learnt score beside those of the keys in the softmax, without a value.  An expert computes
(up + 1) * gate * sigmoid(1.702 gate), where gate is limited from above and up on both sides.
"""

from __future__ import annotations

from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import nn

from megarl.mcore.models.experts import softmax_experts
from megarl.mcore.models.hf import HFConfig, Settings, need, refuse

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
            "activation_func": quick_gelu,
            "activation_func_clamp_value": float(hf.get("swiglu_limit", 7.0)),
            "glu_linear_offset": 1.0,
        }
    )


def _windows(hf: HFConfig) -> Settings:
    """Layers of the kind `sliding_attention`: a token attends to itself and the `sliding_window` - 1 before it."""
    layers = hf["num_hidden_layers"]
    kinds = hf.get("layer_types") or [FULL if i % 2 else SLIDING for i in range(layers)]
    if other := sorted(set(kinds) - {SLIDING, FULL}):
        raise ValueError(f"config.json: layer_types holds {other[0]}; expected {SLIDING} and {FULL} only")
    if len(kinds) != layers:
        raise ValueError(f"config.json: layer_types has {len(kinds)} entries; expected num_hidden_layers={layers}")
    return {
        "window_size": (need(hf, "sliding_window") - 1, 0),
        "window_attn_skip_freq": [int(kind == SLIDING) for kind in kinds],  # despite its name: 1 has a window
    }


def prepare_biases(model: nn.Module) -> None:
    """Correct what Megatron does with sinks and with biases of experts; other models have neither.

    Sinks are cut with their heads, and the last bias of an expert is whole on each rank that has the expert: the ranks
    of a tensor-parallel group do not hold copies of them, as Megatron believes.  It would count copies once in the norm
    of the gradient, and sum the gradients of the biases over the ranks under sequence parallelism (layers:1228).
    It adds this bias to the output of the linear in place (mlp:247), which torch refuses if the output is a view, as
    after a reduction over one rank (layers:1276): whole experts need none.
    """
    for name, param in model.named_parameters():
        is_of_expert = ".experts." in name and ".linear_fc2.bias" in name
        if is_of_expert:
            param.sequence_parallel = False  # type: ignore[attr-defined]
        if is_of_expert or name.endswith(".softmax_offset"):
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
    for module in model.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert and module.bias is not None:
            module.explicit_expert_comm = True
