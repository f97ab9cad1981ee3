"""Runs on a rank: the feed-forwards of a model with our gate, Megatron's operations and its fused activation."""

from __future__ import annotations

from unittest import mock

import torch
from tiny_models import tiny_model
from torch import Tensor

from megarl.layout import Layout
from megarl.mcore.models import model as model_module
from megarl.mcore.models.model import build_model, unwrap
from megarl.mcore.setup import destroy_groups, make_groups


def in_three_ways(families: list[str]) -> dict[str, tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """Of each family: outputs and gradients with our gate, with Megatron's operations, and with its fused activation,
    which is not compiled.
    """
    make_groups(Layout())
    try:
        found = {}
        for family in families:
            with (
                mock.patch.object(model_module, "available_fusions", lambda **_: {"bias_activation_fusion": True}),
                torch.compiler.set_stance("force_eager"),
            ):
                fused = _outputs_and_gradients(family, is_fused=True)
            with mock.patch.object(model_module, "_has_our_gate", lambda _: False):
                apart = _outputs_and_gradients(family, is_fused=False)
            found[family] = _outputs_and_gradients(family, is_fused=False), apart, fused
        return found
    finally:
        destroy_groups()


def _outputs_and_gradients(family: str, *, is_fused: bool) -> list[Tensor]:
    hf = tiny_model(family, tied=False).config.to_dict()
    torch.manual_seed(0)
    (gpt,) = build_model(hf, Layout())
    assert unwrap(gpt).config.bias_activation_fusion is is_fused
    hidden = torch.randn(6, 1, hf["hidden_size"], requires_grad=True)
    outputs = [layer.mlp(hidden)[0] for layer in unwrap(gpt).decoder.layers]
    torch.stack(outputs).square().sum().backward()
    gradients = [x.grad for x in (hidden, *gpt.parameters()) if x.grad is not None]
    return [*(x.detach() for x in outputs), *gradients]
