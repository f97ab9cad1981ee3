"""MTP layers (`arch/mtp.py`): Megatron's block of them behind the last layer of a model, over packed rows.

Needs Megatron-Core 0.19: 0.16.1 neither detaches them nor keeps the norm of their gradient apart.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.layers import LayerSpec, layer_specs, provider_of


class MTPLayer(MultiTokenPredictionLayer):
    """Megatron's, which takes the tokens that follow from the row.

    Megatron shifts the row's tokens sequence by sequence, each time with numbers read from the device, and under
    context parallelism with messages between the ranks (multi_token_prediction:238).
    """

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Any,
        hidden_states: Tensor,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """The embedding of the token that follows each place by as many places as the layer's number, from 1.

        Where none follows it is that of token 0, which nothing reads: only places behind it would attend to it.
        """
        following = packed_seq_params.following[self.layer_number - 1].clamp(min=0)
        embedded = embedding(input_ids=following[None], position_ids=position_ids)
        if self.config.mtp_detach_heads:
            embedded = embedded.detach()
            hidden_states.requires_grad_()  # else a layer that is computed again would have no gradient
        return input_ids, position_ids, padding_mask, embedded, hidden_states


def mtp_block(
    config: TransformerConfig, layer: LayerSpec, like: int, engine: ExecutionOptions
) -> MultiTokenPredictionBlockSubmodules:
    """`config.mtp_num_layers` layers, whose blocks are as layer `like` of the model is."""
    provider = provider_of(engine)
    (block,) = layer_specs(config, layer, [like], engine)
    norm = provider.layer_norm()
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=provider.column_parallel_linear(), mtp_model_layer=block
    )
    return MultiTokenPredictionBlockSubmodules([ModuleSpec(module=MTPLayer, submodules=parts)] * config.mtp_num_layers)
