"""The layers of DeepSeek-V3 and Kimi-K2: Megatron's multi-latent attention."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarl.mcore.models.attention import SDPAttention
from megarl.mcore.models.layers import local_layer

LATENT_NORM_EPS = 1e-6  # of the norms of latent vectors; independent of rms_norm_eps, which the other norms use


class LatentAttention(MLASelfAttention):
    """Multi-latent attention of DeepSeek-V3 and Kimi-K2 (arXiv:2412.19437): Megatron's, with the norms of the model's
    own code, and the complete gradient of the keys' rotary part.

    Every tensor-parallel rank rotates the shared part of the keys for its own heads, so its gradient is the sum over
    ranks.  Megatron 0.16.1 gathers the columns of the projection that computes this part, and then never takes the sum
    (multi_latent_attention:602-612).  With sequence parallelism it does take the sum if the projection's output is
    whole on every rank, so a hook makes it whole.  Models with experts need sequence parallelism for tensor parallelism
    anyway (`check_trainable`).
    """

    def __init__(self, *args: Any, latent_norm: Any = None, **kwargs: Any) -> None:
        """`latent_norm`: the norm of keys and values where queries have none, for which Megatron has no setting."""
        super().__init__(*args, **kwargs)
        if latent_norm is not None:
            self.kv_layernorm = latent_norm(self.config, self.config.kv_lora_rank)
        self.kv_layernorm.eps = LATENT_NORM_EPS
        if self.config.q_lora_rank is not None:
            self.q_layernorm.eps = LATENT_NORM_EPS
        if self.config.sequence_parallel and self.tp_group.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(all_columns)

    def _run_core_attention(self, *args: Any, attn_mask_type: Any = None, **kwargs: Any) -> Tensor:
        """Values of a packed row as they are, where it is our attention: Megatron 0.19.2 makes them as wide as keys,
        with zeros, which it takes off the output, or without their end."""
        if not isinstance(self.core_attention, SDPAttention):
            out: Tensor = super()._run_core_attention(*args, attn_mask_type=attn_mask_type, **kwargs)
            return out
        return self.core_attention(*args, attn_mask_type=attn_mask_type or self.attn_mask_type, **kwargs)


def all_columns(linear: nn.Module, inputs: Any, output: tuple[Tensor, None]) -> tuple[Tensor, None]:  # noqa: ARG001
    """Forward hook: a rank's columns for all tokens -> all columns for its tokens."""
    return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(output[0])), None


def latent_layer(config: TransformerConfig, number: int) -> ModuleSpec:
    """Layer `number`, dense or with experts."""
    spec = local_layer(config, number)
    spec.submodules.self_attention.module = LatentAttention
    if config.q_lora_rank is None:
        spec.submodules.self_attention.params["latent_norm"] = gpt_layer_specs.LocalSpecProvider().layer_norm()
    return spec
