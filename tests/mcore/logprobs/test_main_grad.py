"""The weight's gradient in Megatron's own buffer: what is added, and what DDP's hooks are told."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hf_configs import hf_of
from logprobs_plain import fused_columns, plain_columns, total
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megarl.mcore.logprobs.fused import Job, columns_of_chunks, job_of, token_columns
from megarl.mcore.logprobs.main_grad import WeightGradient
from megarl.mcore.models import model
from megarl.mcore.models.model import transformer_config
from megarl.mcore.setup import Layout

G = torch.Generator().manual_seed(2)
HIDDEN, WEIGHT = torch.randn(6, 4, generator=G), torch.randn(16, 4, generator=G)
QWEN2 = hf_of("qwen2", num_hidden_layers=2)
LABELS, FACTORS = torch.randint(0, 13, (6,), generator=G), torch.randn(3, 6, generator=G)


def parameter(dtype: torch.dtype = torch.float32, **attributes: Any) -> Any:
    weight: Any = WEIGHT.to(dtype).clone().requires_grad_()
    weight.main_grad = torch.ones(16, 4)
    weight.grad_added_to_main_grad = False
    vars(weight).update(attributes)
    return weight


def passes(weight: Tensor, times: int = 1) -> None:
    for _ in range(times):
        total(fused_columns(HIDDEN.to(weight.dtype), weight, LABELS, 13, 0.8), FACTORS).backward()


def plain_gradient(weight: Tensor) -> Tensor:
    own = weight.detach().clone().requires_grad_()
    return torch.autograd.grad(total(plain_columns(HIDDEN.to(own.dtype), own, LABELS, 13, 0.8), FACTORS), own)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_gets_autograds_gradient_each_time(dtype: torch.dtype) -> None:
    weight = parameter(dtype)
    passes(weight, times=2)
    assert weight.grad_added_to_main_grad
    assert torch.equal(weight.main_grad[13:], torch.ones(3, 4)), "rows of padding keep what they had"
    close = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(weight.main_grad, 1 + 2 * plain_gradient(weight).float(), atol=close, rtol=close)


def test_without_main_grad_the_gradient_is_an_ordinary_one() -> None:
    weight = WEIGHT.clone().requires_grad_()
    passes(weight, times=2)
    torch.testing.assert_close(weight.grad, 2 * plain_gradient(weight), atol=1e-5, rtol=1e-5)


def test_a_hook_finds_a_gradient_that_takes_no_memory_and_tied_weights_find_none() -> None:
    """DDP's hook insists on one when it overlaps its reductions; the embedding of tied weights brings its own."""
    found: list[Any] = []
    for attributes in ({}, {"zero_out_wgrad": True}):
        weight = parameter(**attributes)
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, weight=weight: found.append(weight.grad))
        passes(weight)
    assert found[0].untyped_storage().nbytes() == 4
    assert not found[0].any()
    assert found[1] is None


def accumulate(hidden: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    main_grad += grad.T @ hidden


def with_kernel(patch: pytest.MonkeyPatch, kernel: Any) -> None:
    """As if Megatron had found Apex's kernel."""
    patch.setattr(
        layers, "fused_weight_gradient_mlp_cuda", SimpleNamespace(wgrad_gemm_accum_fp32=kernel), raising=False
    )


def test_megatrons_fused_accumulation_is_used_where_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = mock.Mock(side_effect=accumulate)
    weight = parameter()
    with_kernel(monkeypatch, kernel)
    job = Job(("log_probs", "entropy"), 13, fused_accumulation=True)
    columns = columns_of_chunks(job, HIDDEN, weight, LABELS)
    (columns["log_probs"] * FACTORS[0]).sum().backward()
    assert kernel.call_count == 1
    own = WEIGHT.clone().requires_grad_()
    (expected,) = torch.autograd.grad((plain_columns(HIDDEN, own, LABELS, 13)["log_probs"] * FACTORS[0]).sum(), own)
    torch.testing.assert_close(weight.main_grad, 1 + expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kernel", "gpu"), [(True, True), (True, False), (False, True)])
def test_it_is_set_where_there_are_the_kernel_and_a_gpu(
    monkeypatch: pytest.MonkeyPatch, kernel: bool, gpu: bool
) -> None:
    monkeypatch.delattr(layers, "fused_weight_gradient_mlp_cuda", raising=False)
    if kernel:
        with_kernel(monkeypatch, accumulate)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    config = transformer_config(QWEN2, Layout(), torch.float32)
    assert config.gradient_accumulation_fusion is (kernel and gpu)


def test_where_it_is_set_the_linears_and_the_head_of_a_model_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's linears and ours take it from the same config."""
    kernel = mock.Mock(side_effect=accumulate)
    with_kernel(monkeypatch, kernel)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    monkeypatch.setattr(model, "available_fusions", lambda **_: {"gradient_accumulation_fusion": True})
    (actor,) = model.build_model(QWEN2, Layout())
    linears = [m for m in actor.modules() if isinstance(m, (layers.ColumnParallelLinear, layers.RowParallelLinear))]
    assert len(linears) == 4 * QWEN2["num_hidden_layers"] + 1
    assert all(linear.gradient_accumulation_fusion for linear in linears)
    weight: Any = model.output_weight(actor)
    weight.main_grad = torch.zeros_like(weight)
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(3))
    job = job_of(actor, ("log_probs",), 45, 1.0)
    token_columns(job, hidden, weight, LABELS)["log_probs"].sum().backward()
    assert kernel.call_count == 1
    own = weight.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(plain_columns(hidden, own, LABELS, 45)["log_probs"].sum(), own)
    torch.testing.assert_close(weight.main_grad, expected, atol=1e-5, rtol=1e-5)


def test_pieces_add_up() -> None:
    weight = parameter()
    gradient = WeightGradient(weight, fused_accumulation=False)
    for rows in (slice(0, 10), slice(10, 16)):
        gradient.add(rows, torch.ones(6, rows.stop - rows.start), HIDDEN)
    assert gradient.finish() is None
    torch.testing.assert_close(weight.main_grad, 1 + HIDDEN.sum(0).expand(16, 4))
