"""The layers of DeepSeek-V3.2 and GLM-5: Megatron's latent attention over the keys that an indexer chooses.

Needs Megatron-Core 0.19 or later, whose sparse attention takes packed rows.  Without a kernel for GPUs
(`dsa_kernel_backend`) its plain-torch form compares all tokens of a row with each other, also those of other sequences:
time and memory grow with the square of the row.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
    AbsorbedMLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.mcore.models.latent import LATENT_NORM_EPS, all_columns
from megarl.mcore.models.layers import Whole, local_layer
from megarl.mcore.models.pointwise import Norm


class Indexer(dsa.DSAIndexer):
    """Megatron's, frozen: which keys are chosen has no gradient, and megarl trains without its own loss.

    The model's code rotates queries and keys by a Hadamard matrix, which leaves their products as they are, before it
    rounds them to 8 bits.  That is done where there is a kernel for it, which takes bfloat16 alone.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        own = copy.copy(config)
        own.dsa_indexer_rotate_activation = config.bf16 and dsa.hadamard_transform is not None
        super().__init__(own, *args, **kwargs)
        self.requires_grad_(False)


class GivenKeys(dsa.DSAttention):
    """Megatron's attention over chosen keys, for which those of `PackedParams.keys` take the place of the indexer's
    choice, as the choice of another layer does in a layer without an indexer."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Tensor:
        if self.indexer is None or (given := packed_seq_params.keys.get(self.layer_number)) is None:
            output: Tensor = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
            return output
        held = self._get_index_share_topk_holder(packed_seq_params)
        held[self.layer_number] = given.to(args[0].device).long()[None]
        shares: bool = getattr(self, "index_share")  # noqa: B009  # Megatron's code says no type
        self.index_share = self.skip_topk = True
        try:
            output = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self.index_share, self.skip_topk = shares, False
        if not shares:
            del held[self.layer_number]
        return output


class SparseLatentAttention(AbsorbedMLASelfAttention):
    """Megatron's, with the norms of the model's own code, and the gradient of the keys' rotary part as in
    `LatentAttention`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_layernorm.eps = self.q_layernorm.eps = LATENT_NORM_EPS
        if self.config.sequence_parallel and self.tp_group.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(all_columns)


def sparse_layer(config: TransformerConfig, number: int) -> ModuleSpec:
    """Layer `number` of the model, from 0."""
    spec = local_layer(config, number)
    provider: Any = gpt_layer_specs.LocalSpecProvider()
    columns, norm = provider.column_parallel_linear(), provider.layer_norm()
    indexer = dsa.DSAIndexerSubmodules(linear_wq_b=Whole, linear_wk=Whole, k_norm=Norm, linear_weights_proj=Whole)
    keys = dsa.DSAttentionSubmodules(indexer=ModuleSpec(module=Indexer, submodules=indexer))
    spec.submodules.self_attention = ModuleSpec(
        module=SparseLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=AbsorbedMLASelfAttentionSubmodules(
            linear_q_down_proj=columns,
            linear_q_up_proj=columns,
            linear_kv_down_proj=columns,
            linear_kv_up_proj=columns,
            core_attention=ModuleSpec(module=GivenKeys, submodules=keys),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )
    return spec
