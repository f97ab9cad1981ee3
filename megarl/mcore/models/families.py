"""How models of each family are built: their settings, Megarl's parts of their attention, their layers.

A family is added by one entry of FAMILIES; `model.py` knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from megarl.arch.model_types import checked
from megarl.arch.settings.families import SETTINGS
from megarl.arch.settings.hf import HFConfig, Settings
from megarl.mcore.models.attention import cut_over_ranks
from megarl.mcore.models.latent import latent_layer
from megarl.mcore.models.layers import LayerSpec, local_layer


@dataclass(frozen=True)
class Family:
    """How models of one `model_type` are built."""

    settings: Callable[[HFConfig], Settings]  # fields of `config`; ValueError of one sentence if not supported
    config: type[TransformerConfig] = TransformerConfig
    layer: LayerSpec = local_layer
    has_rope: bool = True
    float32: tuple[str, ...] = ()  # ends of names of parameters that a cast to bfloat16 leaves alone


class NormOfAllHeads(nn.Module):
    """MiniMax-M2's RMS norm of queries, and of keys, over all heads at once; Megatron's are of each head alone.

    It is computed over the heads of all tensor-parallel ranks; a rank has the weight of its own heads.

    Each token's squares are summed over the ranks, forwards and backwards: every rank's output depends on all of them.
    """

    weight: nn.Parameter  # [heads of this rank * head_dim]

    def __init__(self, config: TransformerConfig, head_dim: int, num_heads: int) -> None:
        """`num_heads`: of the whole model."""
        super().__init__()
        self.size = num_heads * head_dim
        self.eps = config.layernorm_epsilon
        self.weight = nn.Parameter(torch.ones(self.size // config.tensor_model_parallel_size))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[.., heads of this rank, head_dim] -> the same."""
        wide = x.float()
        squares = reduce_from_tensor_model_parallel_region(wide.square().sum((-2, -1), keepdim=True))
        scale = torch.rsqrt(copy_to_tensor_model_parallel_region(squares) / self.size + self.eps)
        return (wide * scale * self.weight.float().view(x.shape[-2:])).to(x.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """For checkpoints: the weight is cut over tensor-parallel ranks."""
        return cut_over_ranks(self, "weight", prefix, sharded_offsets)


def layer_with_norms_of_all_heads(config: TransformerConfig, number: int) -> ModuleSpec:
    """Layer `number`, for `block_spec`.

    `config.qk_layernorm` is false: otherwise Megatron would sum the gradients of norms with these names over
    tensor-parallel ranks (finalize_model_grads:355), as if each rank had the whole weight.
    """
    assert not config.qk_layernorm
    spec = local_layer(config, number)
    spec.submodules.self_attention.module = AttentionWithNormsOfAllHeads
    return spec


class AttentionWithNormsOfAllHeads(SelfAttention):
    """Gets its norms after it is built, since Megatron refuses to build any where `config.qk_layernorm` is false."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        size = self.hidden_size_per_attention_head
        self.q_layernorm = NormOfAllHeads(config, size, config.num_attention_heads)
        self.k_layernorm = NormOfAllHeads(config, size, config.num_query_groups)


def _gpt_oss(hf: HFConfig) -> Settings:
    """Its settings with the activation, which is Megatron's: x * sigmoid(1.702 x)."""
    return SETTINGS["gpt_oss"](hf) | {"activation_func": quick_gelu}


def _hybrid_layer(config: TransformerConfig, number: int) -> ModuleSpec:
    from megarl.mcore.models.hybrid.gated_delta import hybrid_layer  # 0.16.1 has no such module

    return hybrid_layer(config, number)


def _sparse_layer(config: TransformerConfig, number: int) -> ModuleSpec:
    from megarl.mcore.models.sparse_latent import sparse_layer  # the same

    return sparse_layer(config, number)


@dataclass
class MixedConfig(TransformerConfig):
    """Of models whose layers are one thing each: also which thing, by transformers' names."""

    layer_kinds: list[str] = field(default_factory=list)


def _nemotron_h(hf: HFConfig) -> Settings:
    """Its settings with the activation, which is Megatron's: relu(x)^2."""
    return SETTINGS["nemotron_h"](hf) | {"activation_func": squared_relu}


def _mixed_layer(config: TransformerConfig, number: int) -> ModuleSpec:
    from megarl.mcore.models.hybrid.mamba import mixed_layer  # 0.16.1 has another mixer

    return mixed_layer(config, number)


def family_of(hf: HFConfig) -> Family:
    """Raises ValueError for a model_type that is not in FAMILIES."""
    return FAMILIES[checked(hf.get("model_type"), FAMILIES)]


_OF_QWEN3_5 = (".A_log", ".out_norm.weight")
FAMILIES: dict[str, Family] = {kind: Family(settings) for kind, settings in SETTINGS.items()} | {
    "deepseek_v3": Family(SETTINGS["deepseek_v3"], MLATransformerConfig, latent_layer),
    "kimi_k2": Family(SETTINGS["kimi_k2"], MLATransformerConfig, latent_layer),
    "minimax_m2": Family(SETTINGS["minimax_m2"], layer=layer_with_norms_of_all_heads),
    "qwen3_next": Family(SETTINGS["qwen3_next"], layer=_hybrid_layer, float32=(".A_log",)),
    "qwen3_5_text": Family(SETTINGS["qwen3_5_text"], layer=_hybrid_layer, float32=_OF_QWEN3_5),
    "qwen3_5_moe_text": Family(SETTINGS["qwen3_5_moe_text"], layer=_hybrid_layer, float32=_OF_QWEN3_5),
    "deepseek_v32": Family(SETTINGS["deepseek_v32"], MLATransformerConfig, _sparse_layer),
    "glm_moe_dsa": Family(SETTINGS["glm_moe_dsa"], MLATransformerConfig, _sparse_layer),
    "gpt_oss": Family(_gpt_oss),
    "nemotron_h": Family(_nemotron_h, MixedConfig, _mixed_layer, has_rope=False, float32=(".A_log", ".dt_bias", ".D")),
}
