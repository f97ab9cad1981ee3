"""The biases that sigmoid routers add to the scores of experts to choose them: part of the weights, always float32."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn


def router_biases(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are part of the weights: the biases added to scores to choose experts, always in float32."""
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter) and module.expert_bias is not None:
            yield f"{name}.expert_bias", module.expert_bias


def keep_router_biases(model: nn.Module) -> None:
    """Make them float32 again after a cast of the whole model; Megatron does so only in the first forward pass."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()
