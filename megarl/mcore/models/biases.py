"""Biases that Megatron treats otherwise than other weights: those of routers and of experts, and attention sinks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn


def router_biases(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are part of the weights: the biases added to scores to choose experts, always in float32."""
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter) and module.expert_bias is not None:
            yield f"{name}.expert_bias", module.expert_bias


def keep_float32(model: nn.Module, others: tuple[str, ...]) -> None:
    """Make routers' biases float32 again after a cast of the whole model, as Megatron does in the first forward pass,
    and parameters whose names end with one of `others`."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()
    for name, param in model.named_parameters():
        if name.endswith(others):
            param.data = param.data.float()


def prepare_biases(model: nn.Module) -> None:
    """Correct what Megatron does with sinks and with biases of experts; other models have neither.

    Sinks are cut with their heads, and the last bias of an expert is whole on each rank that has the expert: the ranks
    of a tensor-parallel group do not hold copies of them, as Megatron believes.  It would count copies once in the norm
    of the gradient, and sum the gradients of the biases over the ranks under sequence parallelism (layers:1228).
    It adds this bias to the output of the linear in place (mlp:247), which torch refuses if the output is a view, as
    after a reduction over one rank (layers:1276): whole experts need none.
    """
    for name, param in model.named_parameters():
        is_of_expert = ".experts." in name and ".linear_fc2.bias" in name
        if is_of_expert:
            param.sequence_parallel = False  # type: ignore[attr-defined]
        if is_of_expert or name.endswith(".softmax_offset"):
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
    for module in model.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert and module.bias is not None:
            module.explicit_expert_comm = True
