"""On a real GPU: Triton's kernels against torch's operations, and whole passes against log_softmax in float64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from divergence_plain import plain_divergence
from logprobs_plain import ALL, fused_columns, masked_columns, plain_columns, total
from torch import Tensor
from triton_cases import all_cases, compare

from benchmarks.common.tensor_memory import peak_bytes
from megarl.algo.divergences import make_divergence
from megarl.mcore.logprobs import fused, fused_torch, fused_triton
from megarl.mcore.logprobs.divergence import TeacherStates, divergence_of_chunks
from megarl.mcore.logprobs.fused import Job, keep_hidden
from megarl.mcore.logprobs.main_grad import _adds_widely, add_product_
from megarl.mcore.logprobs.support import Support
from megarl.mcore.logprobs.top_k import log_probs_of_ids, top_k_of_chunks

pytestmark = pytest.mark.gpu


def test_kernels_give_what_torch_gives_at_real_sizes() -> None:
    cases = all_cases("cuda")
    cases["wide"] = compare(torch.float32, 151_643, 151_648, True, 0.7, "cuda")
    cases["bfloat16 wide"] = compare(torch.bfloat16, 151_643, 151_648, True, 0.7, "cuda")
    for name, case in cases.items():
        if "statistics" not in case:
            continue
        assert case["statistics"] < 2e-5, name
        assert case["gradient"] < (2e-2 if name.startswith("bfloat16") else 2e-5), name
        assert case["padding"] == 0, name
    assert cases["not finite nan"] == {"0": 1, "1": 0, "2": 1}


def assert_gradients_close(dtype: torch.dtype, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Logits are float32 for both."""
    close = 2e-5 if dtype is torch.float32 else 3e-2
    for own, expected in zip(ours, theirs, strict=True):
        atol = close * expected.abs().max().item()
        torch.testing.assert_close(own.to(expected.device), expected, atol=atol, rtol=close)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_pass_is_that_of_log_softmax(dtype: torch.dtype) -> None:
    assert fused.gpu_kernels is fused_triton
    g = torch.Generator().manual_seed(0)
    sides = [torch.randn(n, 64, generator=g).to("cuda", dtype).div_(3).requires_grad_() for n in (300, 4096)]
    reference = [torch.randn(n, 64, generator=g).to("cuda", dtype) / 3 for n in (300, 4096)]
    labels = torch.randint(0, 4000, (300,), generator=g).cuda()
    factors = torch.randn(4, 300, generator=g).cuda()
    got = fused_columns(*sides, labels, 4000, 0.8, reference)
    expected = plain_columns(*sides, labels, 4000, 0.8, reference)
    for name in ALL:  # logits are float32 for both
        torch.testing.assert_close(got[name].double(), expected[name], atol=2e-5, rtol=2e-5)
    grads = (torch.autograd.grad(total(columns, factors), sides) for columns in (got, expected))
    assert_gradients_close(dtype, *grads)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_teachers_need_is_that_of_whole_logits(dtype: torch.dtype) -> None:
    """The teacher's head waits in host memory; ids travel as int32."""
    g = torch.Generator().manual_seed(0)
    plain = [(torch.randn(n, 64, generator=g) / 3).to(dtype).requires_grad_() for n in (300, 4096)]
    states, head = ((torch.randn(n, 48, generator=g) / 3).to(dtype) for n in (300, 4096))
    teacher, factors = torch.randint(0, 2, (300,), generator=g), torch.randn(300, generator=g)
    sides, job = [side.detach().cuda().requires_grad_() for side in plain], Job((), 4000, 0.8)

    def compare(got: torch.Tensor, expected: torch.Tensor, weights: torch.Tensor) -> None:
        torch.testing.assert_close(got.cpu().double(), expected, atol=2e-5, rtol=2e-5)
        ours = torch.autograd.grad((got * weights.cuda()).sum(), sides)
        assert_gradients_close(dtype, ours, torch.autograd.grad((expected * weights).sum(), plain))

    said = TeacherStates(teacher.cuda(), states.cuda(), [head])
    got = divergence_of_chunks(job, make_divergence("jsd", 0.3), *sides, said)
    compare(got, plain_divergence("jsd", 0.3, *plain, teacher, states, [head], 4000, 0.8), factors)

    ids, log_probs = top_k_of_chunks(job, states.cuda(), head.cuda(), 8)
    top = (states.double() @ head[:4000].double().T / 0.8).log_softmax(-1).topk(8).values
    torch.testing.assert_close(log_probs.cpu().double(), top, atol=2e-5, rtol=2e-5)
    whole = (plain[0].double() @ plain[1][:4000].double().T / 0.8).log_softmax(-1)
    compare(log_probs_of_ids(job, *sides, ids.int()), whole.gather(1, ids.cpu()), torch.randn(300, 8, generator=g))


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_over_supports_is_that_of_a_masked_log_softmax(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Of every third token no support is known; chunks are parts of the vocabulary, and lots have few ids."""
    assert fused.gpu_kernels is fused_triton
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 2**16)
    g = torch.Generator().manual_seed(1)
    sides = [torch.randn(n, 64, generator=g).to("cuda", dtype).div_(3).requires_grad_() for n in (300, 4096)]
    reference = [torch.randn(n, 64, generator=g).to("cuda", dtype) / 3 for n in (300, 4096)]
    labels = torch.randint(0, 4000, (300,), generator=g)
    factors = torch.randn(4, 300, generator=g).cuda()
    could = torch.rand(300, 4000, generator=g) < 0.01
    could[torch.arange(300), labels] = True
    could[::3] = False
    support = Support(could.sum(1).cumsum(0) - could.sum(1), could.sum(1), could.nonzero()[:, 1].int())
    job = fused.Job(ALL, 4000, 0.8)
    device = torch.device("cuda")
    got = fused.columns_of_chunks(job, *sides, labels.to(device), *reference, support=support.to(device))
    excluded = (~could & could.any(1, keepdim=True)).to(device)
    expected = masked_columns(*sides, labels.to(device), excluded, 0.8, reference)
    for name in ALL:
        torch.testing.assert_close(got[name].double(), expected[name], atol=2e-5, rtol=2e-5)
    grads = (torch.autograd.grad(total(columns, factors), sides) for columns in (got, expected))
    assert_gradients_close(dtype, *grads)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("kernels", [fused_torch, fused_triton], ids=["torch", "triton"])
def test_the_peak_is_a_chunk(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    monkeypatch.setattr(fused, "gpu_kernels", kernels)
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 2**24)
    hidden = torch.randn(4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(65_536, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.zeros(65_536, 64, device="cuda")  # type: ignore[attr-defined]
    labels = torch.zeros(4096, dtype=torch.int64, device="cuda")

    def step() -> None:
        fused_columns(hidden, weight, labels, 65_536)["log_probs"].sum().backward()

    step()
    chunk, logits = (4 + 2) * 2**24, 2 * 4096 * 65_536  # logits in float32, and their gradient in bfloat16
    limit = chunk + 30_000_000 if kernels is fused_triton else chunk + 130_000_000  # blocks in float32
    assert peak_bytes(step, "cuda") < limit < logits


def test_a_references_hidden_states_wait_in_host_memory() -> None:
    hidden = torch.randn(5, 3, device="cuda")
    kept = keep_hidden(hidden)
    torch.cuda.synchronize()
    assert kept.is_pinned()
    assert torch.equal(kept, hidden.cpu())


@pytest.mark.usefixtures("one_gpu")
def test_a_product_is_added_to_a_float32_gradient_in_one_call_and_rounded_once() -> None:
    g = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=g).to("cuda", torch.bfloat16) for _ in range(2))
    target = torch.ones(256, 256, device="cuda")
    add_product_(target, left, right)
    expected = 1 + left.double() @ right.double()
    close = 1e-5 if _adds_widely(torch.bfloat16, torch.float32, target.device) else 2**-8
    assert (target - expected).abs().max() < close * expected.abs().max()
