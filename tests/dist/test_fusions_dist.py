"""Our models with Megatron's fused activation, as on GPUs, compute what they compute without it."""

from unittest import mock

import pytest
import torch
from spawn import Ranks
from tiny_models import tiny_model
from torch import Tensor

from megarl.arch.layout import Layout
from megarl.mcore.models import model as model_module
from megarl.mcore.models.model import build_model, unwrap
from megarl.mcore.setup import destroy_groups, make_groups

pytestmark = pytest.mark.dist


def in_two_ways(family: str) -> list[list[Tensor]]:
    """Outputs of feed-forwards and gradients with our gate, and with the fused activation, which is not compiled."""
    make_groups(Layout())
    try:
        with (
            mock.patch.object(model_module, "available_fusions", lambda **_: {"bias_activation_fusion": True}),
            torch.compiler.set_stance("force_eager"),
        ):
            fused = _outputs_and_gradients(family, is_fused=True)
        return [_outputs_and_gradients(family, is_fused=False), fused]
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


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "deepseek_v3"])
def test_the_fused_activation_is_our_gate(one_rank: Ranks, family: str) -> None:
    """Of dense layers, experts and shared experts."""
    ours, fused = one_rank.run(in_two_ways, family, timeout_s=120)[0]
    assert len(ours) > 8
    for one, other in zip(ours, fused, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
