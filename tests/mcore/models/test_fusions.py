"""Which fused kernels a model uses, by what the machine has."""

from typing import Any

import pytest
import torch
from hf_configs import hf_of
from megatron.core.extensions import transformer_engine as te
from torch import nn

from megarl.arch.layout import Layout
from megarl.mcore.models import fusions as fusions_module
from megarl.mcore.models.fusions import available_fusions, fuse_weight_gradients, fusions
from megarl.mcore.models.model import transformer_config

NAMES = {
    "activation": "bias_activation_fusion",
    "accumulate": "gradient_accumulation_fusion",
    "rope": "apply_rope_fusion",
    "permute": "moe_permute_fusion",
}


@pytest.mark.parametrize(
    ("gpu", "transformer_engine", "permutation", "accumulation", "latent", "wanted"),
    [
        (False, False, False, False, False, ""),
        (False, True, True, True, False, ""),
        (True, False, False, False, False, "activation"),
        (True, False, True, True, False, "activation accumulate"),  # local layers, all installed
        (True, True, True, False, False, "activation rope permute"),
        (True, True, False, False, False, "activation rope"),  # Transformer Engine 2.0
        (True, True, True, True, True, "activation accumulate permute"),
        (True, True, True, True, False, "activation accumulate rope permute"),
    ],
)
def test_each_fusion_where_its_kernel_is(
    gpu: bool, transformer_engine: bool, permutation: bool, accumulation: bool, latent: bool, wanted: str
) -> None:
    has = {"transformer_engine": transformer_engine, "permutation": permutation, "accumulation": accumulation}
    found = fusions(gpu=gpu, latent_attention=latent, **has)
    assert {name for name, is_on in found.items() if is_on} == {NAMES[word] for word in wanted.split()}
    assert set(found) == set(NAMES.values())


def test_local_layers_with_biases_have_no_fused_activation() -> None:
    """It would clamp gate and up before it adds their biases; Transformer Engine's linears have added them."""
    of_gpu = {"gpu": True, "permutation": True, "accumulation": True, "latent_attention": False, "biases": True}
    assert not fusions(transformer_engine=False, **of_gpu)[NAMES["activation"]]
    assert fusions(transformer_engine=True, **of_gpu)[NAMES["activation"]]
    assert not fusions(transformer_engine=True, gated=False, **of_gpu)[NAMES["activation"]], "Megatron has none"


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_model_on_a_cpu_has_none(family: str) -> None:
    config: Any = transformer_config(hf_of(family), Layout(), torch.float32)
    assert not any(getattr(config, name) for name in NAMES.values())


def test_what_is_installed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in fusions_module._PERMUTATION:
        monkeypatch.setattr(te, name, object(), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = available_fusions(uses_transformer_engine=True, latent_attention=False, fsdp=False)
    assert {name for name, is_on in found.items() if not is_on} == {"gradient_accumulation_fusion"}
    monkeypatch.setattr(te, "fused_unpermute", None)
    assert not available_fusions(uses_transformer_engine=True, latent_attention=False, fsdp=False)["moe_permute_fusion"]


def test_weight_gradients_are_fused_in_the_linears_that_can() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].fuse_wgrad_accumulation = False  # type: ignore[assignment]
    fuse_weight_gradients(model)
    assert model[0].fuse_wgrad_accumulation
    assert not hasattr(model[1], "fuse_wgrad_accumulation")


def test_only_weights_with_a_permanent_gradient_accumulate_it_in_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fusions_module, "has_fused_accumulation", lambda: True)
    found = [
        available_fusions(uses_transformer_engine=False, latent_attention=False, fsdp=fsdp)[NAMES["accumulate"]]
        for fsdp in (False, True)
    ]
    assert found == [True, False]


@pytest.mark.parametrize(
    ("gpu", "layout", "frees"),
    [
        (True, Layout(pp=2), True),
        (True, Layout(pp=2, vpp=2), False),  # its output is still being sent when Megatron frees it
        (True, Layout(), False),
        (False, Layout(pp=2), False),
    ],
)
def test_a_stage_frees_its_output_where_it_is_sent_by_then(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, layout: Layout, frees: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert transformer_config(hf_of("qwen3"), layout, torch.float32).deallocate_pipeline_outputs is frees
