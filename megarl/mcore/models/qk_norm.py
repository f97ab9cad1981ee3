"""Norms of queries and of keys over all heads at once, as MiniMax-M2 has them; Megatron's are of each head alone."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megarl.mcore.models.layers import local_layer


class NormOfAllHeads(nn.Module):
    """RMS norm over the heads of all tensor-parallel ranks; a rank has the weight of its own heads, as of their rows.

    Each token's squares are summed over the ranks, forwards and backwards: every rank's output depends on all of them.
    """

    weight: nn.Parameter  # [heads of this rank * head_dim]

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int) -> None:
        """`hidden_size`: of one head, as Megatron passes it; `num_heads`: of the whole model."""
        super().__init__()
        self.size, self.eps = num_heads * hidden_size, eps
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
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=ps.get_tensor_model_parallel_group(),
            dp_cp_group=ps.get_data_parallel_group(with_context_parallel=True),
        )
        return state


def layer_with_norms_of_all_heads(config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    """One layer, for `block_spec`.

    `config.qk_layernorm` is false: otherwise Megatron would sum the gradients of norms with these names over
    tensor-parallel ranks (finalize_model_grads:355), as if each rank had the whole weight.
    """
    assert not config.qk_layernorm
    spec = local_layer(config, has_experts)
    parts = spec.submodules.self_attention.submodules
    parts.q_layernorm = ModuleSpec(NormOfAllHeads, params={"num_heads": config.num_attention_heads})
    parts.k_layernorm = ModuleSpec(NormOfAllHeads, params={"num_heads": config.num_query_groups})
    return spec
