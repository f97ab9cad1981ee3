"""DeepSeek-V3 and Kimi-K2: multi-latent attention (arXiv:2412.19437), with the experts of `experts.py`.

Queries, keys and values are expanded from small latent vectors.  The rotary dimensions are separate, and those of the
keys are shared by all heads.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarl.mcore.models.layers import local_layer

LATENT_NORM_EPS = 1e-6  # of the latents' norms; independent of rms_norm_eps, which the other norms use


class LatentAttention(MLASelfAttention):
    """Megatron's, with the norms of the model's own code, and the complete gradient of the keys' rotary part.

    Every tensor-parallel rank rotates the shared part of the keys for its own heads, so its gradient is the sum over
    ranks.  Megatron 0.16.1 gathers the columns of the projection that computes this part, and then never takes the sum
    (multi_latent_attention:602-612).  With sequence parallelism it does take the sum if the projection's output is
    whole on every rank, so a hook makes it whole.  Models with experts need sequence parallelism for tensor parallelism
    anyway (`check_trainable`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_layernorm.eps = LATENT_NORM_EPS
        if self.config.q_lora_rank is not None:
            self.q_layernorm.eps = LATENT_NORM_EPS
        if self.config.sequence_parallel and self.tp_group.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(_all_columns)


def _all_columns(linear: nn.Module, inputs: Any, output: tuple[Tensor, None]) -> tuple[Tensor, None]:  # noqa: ARG001
    """Forward hook: a rank's columns for all tokens -> all columns for its tokens."""
    return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(output[0])), None


def latent_layer(config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    """One layer, dense or with experts."""
    spec = local_layer(config, has_experts)
    spec.submodules.self_attention.module = LatentAttention
    return spec
