"""The norm and the gate of local layers compute what torch's chains of operations compute."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_configs import hf_of
from torch import Tensor, nn

from megarl.arch.layout import Layout
from megarl.mcore.models import pointwise
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.model import transformer_config
from megarl.mcore.models.pointwise import Gate, Norm, RMSNorm, ZeroCentredNorm

EPS = 1e-6


def with_gradients(function: Any, *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of the inputs for a weighted sum of it."""
    own = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*own)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), own)]


def test_norms_are_marked_for_sequence_parallelism() -> None:
    common = {"layernorm_zero_centered_gamma": False}
    for sequence_parallel in (True, False):
        config = SimpleNamespace(normalization="RMSNorm", sequence_parallel=sequence_parallel, **common)
        norm = Norm(config, 16, eps=EPS)
        assert isinstance(norm, nn.RMSNorm)
        assert norm.eps == EPS
        assert norm.weight.sequence_parallel is sequence_parallel
    config = SimpleNamespace(normalization="LayerNorm", sequence_parallel=False, **common)
    assert isinstance(Norm(config, 16), nn.LayerNorm)


def test_a_zero_centred_norm_multiplies_by_one_more_than_its_weight() -> None:
    x, weight = torch.randn(5, 16), torch.randn(16)
    norm = ZeroCentredNorm(16, EPS)
    assert not norm.weight.any()
    norm.weight.data = weight
    torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (16,), 1 + weight, EPS))
    rounded = norm.bfloat16()(x.bfloat16())  # 1 + weight is never rounded
    wide = nn.functional.rms_norm(x.bfloat16().float(), (16,), 1 + weight.bfloat16().float(), EPS)
    assert torch.equal(rounded, wide.bfloat16())


@pytest.mark.parametrize("shape", [(7, 1, 6), (5, 1, 3, 8), (1, 4), (0, 1, 4)])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_an_rms_norm_and_its_gradients_are_torchs(shape: tuple[int, ...], dtype: torch.dtype, rtol: float) -> None:
    torch.manual_seed(0)
    x, weight, norm = torch.randn(shape, dtype=dtype), torch.rand(shape[-1], dtype=dtype), RMSNorm(shape[-1], eps=EPS)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        norm._parameters["weight"] = weight
        return norm(x)

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, shape[-1:], weight, EPS)

    for mine, wanted in zip(with_gradients(ours, x, weight), with_gradients(theirs, x, weight), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=rtol, atol=rtol)


def test_an_rms_norm_of_zeros_and_of_large_numbers_is_finite() -> None:
    for x in (torch.zeros(2, 4), torch.full((2, 4), 1e15)):
        assert all(bool(found.isfinite().all()) for found in with_gradients(RMSNorm(4, eps=EPS), x))


def test_numbers_of_16_bits_are_computed_in_float32_and_rounded_once() -> None:
    norm, theirs = RMSNorm(8, eps=EPS).to(torch.bfloat16), nn.RMSNorm(8, eps=EPS)
    x = torch.randn(5, 8).to(torch.bfloat16)
    assert torch.equal(norm(x), theirs(x.float()).to(torch.bfloat16))
    for mine, wanted in zip(with_gradients(norm, x), with_gradients(theirs, x.float()), strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.float(), wanted, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("shape", [(5, 1, 12), (12,)])
@pytest.mark.parametrize("rows", [0, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gate_is_megatrons_operations_to_the_bit(
    dtype: torch.dtype, rows: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rows`: as many as a block may have; one row is a block even if it is larger."""
    monkeypatch.setattr(pointwise, "CACHED_ELEMENTS", rows * 12)

    def theirs(x: Tensor) -> Tensor:  # mlp.py, MLP.forward
        gate, up = torch.chunk(x, 2, dim=-1)
        return F.silu(gate) * (up + 0.0)

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for mine, wanted in zip(with_gradients(Gate(), x), with_gradients(theirs, x), strict=True):
        assert torch.equal(mine, wanted)
    assert [x.shape for x in with_gradients(Gate(), torch.zeros(0, 1, 12))] == [(0, 1, 6), (0, 1, 12)], "no token"


def test_the_gate_keeps_its_input_alone() -> None:
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        Gate()(torch.randn(5, 1, 12, requires_grad=True))
    assert kept == [5 * 12]


@pytest.mark.parametrize(("family", "is_ours"), [("qwen3", True), ("deepseek_v3", True), ("gpt_oss", False)])
def test_it_gates_what_is_plain_and_not_fused(family: str, is_ours: bool) -> None:
    hf = hf_of(family)
    config: Any = transformer_config(hf, Layout(), torch.float32)
    assert config.use_te_activation_func is is_ours
    unfused = ExecutionOptions(override_transformer_config={"bias_activation_fusion": False})
    config = transformer_config(hf, Layout(), torch.float32, unfused)
    assert config.use_te_activation_func is is_ours
