"""MTP layers (`arch/mtp.py`): Megatron's block of them behind the last layer of a model, over packed rows.

They need Megatron-Core 0.19: 0.16.1 neither detaches them nor keeps the norm of their gradient apart.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.arch.mtp import TRAINED_MTP, trained_mtp
from megarl.arch.settings.hf import HFConfig


class MTPLayer(MultiTokenPredictionLayer):
    """Megatron's, which takes the tokens that follow from the row.

    Megatron shifts the row's tokens sequence by sequence, each time with numbers read from the device, and under
    context parallelism with messages between the ranks (multi_token_prediction:238).
    """

    def _get_embeddings(self, *, embedding: Any, hidden_states: Tensor, **given: Any) -> tuple[Any, ...]:
        """The embedding of the token that follows each place by as many places as the layer's number, from 1.

        Where none follows it is that of token 0, which nothing reads: only places behind it would attend to it.
        """
        following = given["packed_seq_params"].labels[self.layer_number - 1]
        embedded = embedding(input_ids=following[None], position_ids=given["position_ids"])
        if self.config.mtp_detach_heads:
            hidden_states.requires_grad_()  # else a layer that is computed again would have no gradient
            if getattr(embedding.word_embeddings.weight, "shared", False):
                embedded.register_hook(torch.zeros_like)  # Megatron waits for a gradient of the last stage's copy
            else:
                embedded = embedded.detach()
        return given["input_ids"], given["position_ids"], given["padding_mask"], embedded, hidden_states


def mtp_settings(hf: HFConfig) -> dict[str, Any]:
    """Fields of Megatron's configuration; none, as 0.16.1 has not all, for a model without MTP layers."""
    number = trained_mtp(hf)
    return {"mtp_num_layers": number, "mtp_detach_heads": hf[TRAINED_MTP] == "detached"} if number else {}


def mtp_block(config: TransformerConfig, chunk: TransformerBlockSubmodules) -> Any:
    """What the layers behind a chunk are built of, whose blocks are as its last layer; None without MTP layers."""
    if not config.mtp_num_layers:
        return None
    norm, block = chunk.layer_norm, chunk.layer_specs[-1]
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=block
    )
    return MultiTokenPredictionBlockSubmodules([ModuleSpec(module=MTPLayer, submodules=parts)] * config.mtp_num_layers)
