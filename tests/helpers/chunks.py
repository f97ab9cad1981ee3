"""A model's parameters over all its chunks, and its gradients put together as if they were its weights."""

from typing import Any

import torch
from torch import Tensor, nn

from megarl.mcore.models.model import Model
from megarl.weights.hf.export import hf_tensors
from megarl.weights.mapping.blocks import Role


def named_parameters(model: Model) -> list[tuple[str, nn.Parameter]]:
    return [pair for chunk in model for pair in chunk.named_parameters()]


def parameters(model: Model) -> list[Any]:
    return [param for _, param in named_parameters(model)]


@torch.no_grad()
def fill_value_head(model: Model) -> None:
    """A head of zeros, as a critic starts with, would hide errors in the trunk's gradient."""
    for name, param in named_parameters(model):
        if "output_layer" in name:
            param.copy_(torch.linspace(-0.5, 0.5, param.numel()).view_as(param))


def weights(model: Model, hf: dict[str, Any], role: Role) -> dict[str, Tensor]:
    """{HF name: whole tensor} on every rank."""
    return {name: tensor.clone() for name, tensor in hf_tensors(model, hf, role=role)}


def gradients(model: Model, hf: dict[str, Any], role: Role) -> dict[str, Tensor]:
    """{HF name: the whole gradient} on every rank.

    Meanwhile the modules have other parameters.  Data of another type in place of a parameter's own would end the node
    that accumulates its gradient, and with it the hooks of Megatron's DistributedDataParallel.
    """
    made = {param: _gradient(param) for param in parameters(model)}
    places = [module._parameters for chunk in model for module in chunk.modules()]
    held = [dict(place) for place in places]
    for place in places:
        place.update({name: made.get(param) for name, param in place.items()})
    whole = weights(model, hf, role)
    for place, params in zip(places, held, strict=True):
        place.update(params)
    return whole


def _gradient(param: Any) -> nn.Parameter:
    """As a parameter that is laid out as its own is; of a frozen one zeros."""
    gradient = param.main_grad.clone() if param.requires_grad else torch.zeros_like(param)
    made = nn.Parameter(gradient, requires_grad=False)
    vars(made).update(vars(param))
    return made
