"""Which of Megatron's fused kernels a model uses: a function of the device and of what is installed."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import layers
from torch import nn

_PERMUTATION = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)


def has_fused_permutation() -> bool:
    """Whether Transformer Engine has the kernels that sort tokens by expert: since 2.1."""
    return all(getattr(transformer_engine, name, None) is not None for name in _PERMUTATION)


def has_fused_accumulation() -> bool:
    """Whether weights' gradients are added to main_grad inside the matrix product, in every linear of the model.

    This needs Apex's kernel and a GPU.  It is checked by Megatron's own import, not by the presence of the package: a
    package that was built for another torch cannot be imported, and creating Megatron's linears would fail.
    """
    return torch.cuda.is_available() and hasattr(layers, "fused_weight_gradient_mlp_cuda")


def fusions(
    *,
    gpu: bool,
    transformer_engine: bool,
    permutation: bool,
    accumulation: bool,
    latent_attention: bool,
    biases: bool = False,
    gated: bool = True,
) -> dict[str, bool]:
    """Fields of Megatron's TransformerConfig.  All are false without a GPU.

    `transformer_engine`: the layers are its own.  `permutation`: `has_fused_permutation`.  `accumulation`:
    `has_fused_accumulation`, and each weight has a permanent main_grad: Megatron-FSDP gives it a new one in float32 for
    every micro-batch, into which Megatron's linears do not multiply 16-bit factors (layers:565).  `latent_attention`:
    the model has multi-latent attention.  `biases`: its linears have some.  `gated`: so are its feed-forwards.

    Not here, because nothing would change: masked_softmax_fusion (neither attention uses Megatron's softmax),
    persist_layer_norm (nor its norm), cross_entropy_loss_fusion (nor its loss), bias_dropout_fusion (without
    dropout it is an addition, and TEGroupedMLP refuses it, experts:530).
    """
    return {
        # One kernel for silu(gate) * up, compiled by torch.  It and the next product keep 3 numbers of a token for each
        # of the intermediate size; separate operations keep 5 (tests/plan/test_saved_tensors.py).
        # With biases Megatron's local layers would clamp before they add one (fused_bias_geglu); TE's linears add it.
        "bias_activation_fusion": gpu and gated and (transformer_engine or not biases),
        # Apex's kernel.  Transformer Engine has its own: `fuse_weight_gradients`.
        "gradient_accumulation_fusion": gpu and accumulation,
        # One kernel for a packed row, in float32; ours (`rope.turned`) rounds cosines to the model's dtype.
        # Multi-latent attention has kernels of its own for YaRN, which Megatron calls experimental.
        "apply_rope_fusion": gpu and transformer_engine and not latent_attention,
        "moe_permute_fusion": gpu and transformer_engine and permutation,
    }


def available_fusions(
    *, uses_transformer_engine: bool, latent_attention: bool, fsdp: bool, biases: bool = False, gated: bool = True
) -> dict[str, bool]:
    """The fusions on this machine; `fsdp`: Megatron-FSDP wraps the model."""
    return fusions(
        gpu=torch.cuda.is_available(),
        transformer_engine=uses_transformer_engine,
        permutation=has_fused_permutation(),
        accumulation=has_fused_accumulation() and not fsdp,
        latent_attention=latent_attention,
        biases=biases,
        gated=gated,
    )


def fuse_weight_gradients(model: nn.Module) -> None:
    """Let Transformer Engine's linears add their weight gradients to main_grad inside the matrix product.

    They do so without Apex, but Megatron's setting for it needs Apex too, because of the output layer.  Only for models
    whose wrapper gives each weight a permanent main_grad: not for Megatron-FSDP.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
