"""gpt-oss: its activation, and what Megatron does with attention sinks and with biases of experts."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import nn

from megarl.model_settings.families import SETTINGS
from megarl.model_settings.hf import HFConfig, Settings


def gpt_oss(hf: HFConfig) -> Settings:
    """Its settings with the activation, which is Megatron's: x * sigmoid(1.702 x)."""
    return SETTINGS["gpt_oss"](hf) | {"activation_func": quick_gelu}


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
