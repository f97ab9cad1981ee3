"""The layers of Qwen3-Next and Qwen3.5: Megatron's gated delta net in most, gated attention in the others.

Needs Megatron-Core 0.18 or later, whose gated delta net takes packed rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common, gdn
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarl.mcore.models.hybrid import delta_kernels
from megarl.mcore.models.layers import local_layer

if not common.HAVE_FLA:
    common.HAVE_FLA = True
    common.l2norm = delta_kernels.l2norm
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = delta_kernels.causal_conv1d, delta_kernels.chunk_gated_delta_rule


class HeadNorm(nn.Module):
    """RMS norm of each value head, with one weight for all heads.

    A tensor-parallel rank sees its own heads, so the weight's gradient is the sum over ranks.  Megatron takes that sum
    with sequence parallelism alone (finalize_model_grads:452 asks for `sequence_parallel`, or a name with
    q_layernorm or k_layernorm): without it the gradient was off by 130 %.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        """`hidden_size`: of one head, as Megatron passes it."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., head] -> the same."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = copy_to_tensor_model_parallel_region(self.weight)
        return F.rms_norm(x.to(wide), (x.size(-1),), weight.to(wide), self.eps).to(x.dtype)


class DeltaNet(GatedDeltaNet):
    """Megatron's, whose decay e^A_log is computed in float32, as the model's own code does: in bfloat16 it would move
    log-probs by 4e-3."""

    def _compute_g_and_beta(self, A_log: Tensor, dt_bias: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
        wide = torch.promote_types(alpha.dtype, torch.float32)
        return -A_log.to(wide).exp() * F.softplus(alpha.to(wide) + dt_bias.to(wide)), beta.sigmoid()


def hybrid_layer(config: TransformerConfig, number: int) -> ModuleSpec:
    """Layer `number` of the model, from 0."""
    spec = local_layer(config, number)
    if config.linear_attention_freq[number]:
        provider: Any = gpt_layer_specs.LocalSpecProvider()
        spec.submodules.self_attention = ModuleSpec(
            module=DeltaNet,
            submodules=GatedDeltaNetSubmodules(
                in_proj=provider.column_parallel_linear(), out_norm=HeadNorm, out_proj=provider.row_parallel_linear()
            ),
        )
    return spec
