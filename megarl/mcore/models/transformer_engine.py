"""Transformer Engine's modules in the structure of Megatron's local layers.

Megatron's own spec for it also fuses each norm with the following linear, under other names.  In bfloat16 this fuses
only the calls; the two kernels stay the same.  So norms stay separate here, and both kinds of layers have the same
parameter names, adapter hooks and checkpoints.  Only experts differ: one call for all experts of a rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.models.backends import LocalSpecProvider
from torch import nn

from megarl.mcore.versions import grouped_experts

_GROUPED = re.compile(r"\.experts\.linear_fc([12])\.(weight|bias)(\d+)$")


class TransformerEngineProvider(LocalSpecProvider):
    """Modules are looked up at the call: without Transformer Engine, Megatron has stand-ins under these names."""

    def column_parallel_linear(self) -> type:
        return te.TEColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return te.TERowParallelLinear

    def layer_norm(self, *_: bool, **__: bool) -> type:
        return te.TENorm

    def core_attention(self) -> type:
        return te.TEDotProductAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *_: bool) -> Any:
        return grouped_experts(moe_use_grouped_gemm)


def mark_shards(model: nn.Module) -> None:
    """Say of the weights and first biases of experts that they are cut, and along which dimension, as local layers do.

    Transformer Engine no longer does since 2.13: the norm of the gradient would take those of all but the first
    tensor-parallel rank for copies (optimizer:156), and Muon a shard for a whole matrix.  Second biases are whole:
    see `prepare_biases`.
    """
    for name, param in model.named_parameters():
        if (found := _GROUPED.search(name)) and (found[2] == "weight" or found[1] == "1"):
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
            param.partition_dim = int(found[1]) - 1  # type: ignore[attr-defined]


def share_sinks(model: nn.Module, cp: int) -> None:
    """Of an attention sink's gradient leave each context-parallel rank its part of the sum over these ranks.

    Where they exchange heads, Transformer Engine gathers all of it on each of them (context_parallel:698).
    """
    for name, param in model.named_parameters():
        if name.endswith(".softmax_offset"):
            param.register_hook(lambda grad: grad / cp)


def local_name(name: str) -> str:
    """The name of a parameter with Transformer Engine's layers -> its name with ours.

    Example: mlp.experts.linear_fc1.weight3 -> mlp.experts.local_experts.3.linear_fc1.weight; other names stay.
    """
    return _GROUPED.sub(r".experts.local_experts.\3.linear_fc\1.\2", name)


def without_extra_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A (sharded) state dict of weights only: Transformer Engine adds state for float8, empty in other types."""
    return {name: value for name, value in state.items() if "._extra_state" not in name}
